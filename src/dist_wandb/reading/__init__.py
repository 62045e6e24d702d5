"""The W&B runs on disk, as a program or the command line takes them: files of one run brought together."""
