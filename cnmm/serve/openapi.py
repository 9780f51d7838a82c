"""The interface as an OpenAPI document."""

from __future__ import annotations

from typing import Any

from cnmm.serve.served import Served


def openapi(served: Served) -> dict[str, Any]:
    """Written by hand: what the server takes and answers."""
    return {"openapi": "3.1.0", "info": {"title": served.model, "version": "1"}, "paths": {}}
