"""Every instant of a device gets one owner; seconds by line, layer, kernel and collective."""
