"""bebop as a plug-in of verl: config, corrections, the CPU as a platform."""
