"""What a run stands on: processes, devices, meshes, XLA settings, and the error a user can mend."""
