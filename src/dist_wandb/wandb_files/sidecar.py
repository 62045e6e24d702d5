"""The file beside an offline run that keeps what W&B does not: label, primary, finish flag."""

SIDECAR_NAME = "dist-wandb.json"
