"""Read the W&B runs on disk, for programs and the command line. The files of one run are grouped into one run."""
