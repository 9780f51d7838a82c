"""What a running server says about itself: enough to ask it, and to foretell what it will do."""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import inside, parse_json
from cnmm.serve.menu import Menu
from cnmm.serve.open_loop import Address

TIMEOUT_S = 10.0
CPU_SECONDS = "process_cpu_seconds_total"
"""By Prometheus' usual name: what the process of the event loop has computed."""
OUTPUTS = {"classification": ("probabilities",), "segmentation": ("label_map",)}
"""What clients want, by task."""
_MOST_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class About:
    """A server, by its own words."""

    model: str
    tensor: str
    """The name of its input."""
    image_shape: tuple[int, int, int]
    """Height, width and channels."""
    outputs: tuple[str, ...]
    """The names of those that a load test asks for."""
    classes: tuple[str, ...]
    task: str
    target_ms: float
    cores: int
    usable_cores: int
    """Of its machine; what is more than `cores` is for the event loop."""
    policy: str
    menu: Menu


def ask_about(address: Address) -> About:
    """Asks a server of `cnmm serve`; any other is refused."""
    answer = _get(address, "/about")
    with inside(address.authority, "is it a server of `cnmm serve`?"):
        about = _object(answer, "/about")
        model = _fields.get(about, "model", _fields.TEXT)
        described = _object(_get(address, f"/v2/models/{model}"), f"/v2/models/{model}")
        (tensor,) = _fields.get(described, "inputs", _fields.list_of(_fields.OBJECT, 1))
        _fields.get(tensor, "datatype", _fields.one_of("UINT8"), "inputs[0].")
        size = _fields.get(about, "input", _fields.OBJECT)
        height, width, channels = (
            _fields.get(size, name, _fields.whole(1, 2**16), "input.") for name in ("height", "width", "channels")
        )
        task = _fields.get(about, "task", _fields.one_of(*OUTPUTS))
        points = _fields.get(about, "points", _fields.list_of(_fields.OBJECT))
        return About(
            model=model,
            tensor=_fields.get(tensor, "name", _fields.TEXT, "inputs[0]."),
            image_shape=(height, width, channels),
            outputs=OUTPUTS[task],
            classes=tuple(_fields.get(about, "classes", _fields.list_of(_fields.TEXT))),
            task=task,
            target_ms=_fields.get(about, "target_ms", _fields.number(above=0, most=1e9)),
            cores=_fields.get(about, "cores", _fields.whole(1, 2**16)),
            usable_cores=_fields.get({"usable_cores": 1, **about}, "usable_cores", _fields.whole(1, 2**16)),
            policy=_fields.get(about, "policy", _fields.TEXT),
            menu=Menu.from_dict({**about, "points": [{**point, "point": point.get("name")} for point in points]}),
        )


def ask_cpu_ms(address: Address) -> float:
    """The time that its event loop has computed so far; 0 if it does not say, or is gone."""
    try:
        status, body = _get(address, "/metrics")
    except UserError:
        return 0.0
    found = re.search(rf"^{CPU_SECONDS} ([0-9.e+]+)$", body.decode("utf-8", "replace"), re.MULTILINE)
    return 1e3 * float(found[1]) if status == 200 and found else 0.0


def _get(address: Address, path: str) -> tuple[int, bytes]:
    if address.secure:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address.host, address.port, timeout=TIMEOUT_S, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{address.prefix}{path}")
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        words = str(error) or type(error).__name__
        raise UserError(f"{address.authority}: no answer ({words}); start `cnmm serve` there") from None
    finally:
        connection.close()


def _object(answer: tuple[int, bytes], path: str) -> Mapping[str, Any]:
    status, body = answer
    if status != 200:
        raise UserError(f"GET {path} was answered with status {status}")
    found: Mapping[str, Any] = _fields.checked(parse_json(body), path, _fields.OBJECT)
    return found
