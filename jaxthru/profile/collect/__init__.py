"""What runs while a run is profiled."""
