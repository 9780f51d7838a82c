"""The page of the server: one file, sent with a policy that lets it load and run nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page and the headers that it is sent with."""

    html: str
    headers: dict[str, str]


def read_page(path: Path = PAGE) -> Page:
    """The page, whose own scripts and styles are allowed by their checksums, and no others."""
    html = path.read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _checksums(html, "script"),
        "style-src": _checksums(html, "style"),
        "img-src": "'self' blob: data:",
        "media-src": "blob: mediastream:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "permissions-policy": "camera=(self)",
        "cache-control": "no-cache",
    }
    return Page(html=html, headers=headers)


def _checksums(html: str, tag: str) -> str:
    inside = re.findall(rf"<{tag}(?:\s[^>]*)?>(.*?)</{tag}>", html, re.DOTALL)
    sums = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside]
    return " ".join(f"'sha256-{value}'" for value in sums) or "'none'"
