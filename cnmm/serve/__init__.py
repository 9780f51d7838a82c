"""Serving a ladder under load: quality bends before latency breaks. No torch."""
