"""Benchmarks: predictions by the TPU compiler (`ladder`, `tune`), measurements on a TPU (`on_tpu`), and quality."""
