"""Running ladders without torch: sessions, early exit, engines, latency."""
