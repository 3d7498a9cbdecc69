"""bebop as a plug-in of verl: config, patches, and the CPU as a platform."""
