"""Where rows of metrics go, one file each: see `training.record.Sink`."""
