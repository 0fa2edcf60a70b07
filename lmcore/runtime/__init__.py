"""From the launcher's facts to a device and the functions that a run needs of it."""
