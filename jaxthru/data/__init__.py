"""The data plane, sources -> store -> mixture -> loading: the dataloader and what it stands on."""
