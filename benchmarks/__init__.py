"""What is measured: `python -m benchmarks.NAME`, on a quiet machine. Each ends with one line of JSON."""
