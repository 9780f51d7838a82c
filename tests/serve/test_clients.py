"""Clients that hang up, as our own server tells it and as any other server of ASGI does."""

import asyncio

from starlette.requests import Request

from cnmm.serve.clients import HANGUP, Hangups, hangup_of


def test_a_connection_tells_whoever_still_wants_to_know():
    called, listened = [], []
    hangups = Hangups(lambda: listened.append(True))
    hangups(lambda: called.append("a"))
    forget = hangups(lambda: called.append("b"))
    hangups(lambda: called.append("c"))
    forget()
    hangups.end()
    assert called == ["a", "c"]
    assert len(listened) == 3  # a connection that does not read does not notice


def test_who_asks_too_late_is_told_at_once():
    called, hangups = [], Hangups(lambda: None)
    hangups.end()
    hangups(lambda: called.append("late"))
    assert called == ["late"]


def test_a_request_has_the_hangup_of_its_connection():
    hangups = Hangups(lambda: None)
    assert hangup_of(Request({"type": "http", "extensions": {HANGUP: {"call": hangups}}})) is hangups


def test_other_servers_are_asked_for_messages():
    async def story(forgetting):
        messages, called = asyncio.Queue(), []
        hangup = hangup_of(Request({"type": "http"}, receive=messages.get))
        forget = hangup(lambda: called.append("gone"))
        if forgetting:
            forget()
        for kind in ("http.request", "http.disconnect"):
            messages.put_nowait({"type": kind})
        await asyncio.sleep(0.05)
        return called

    assert asyncio.run(story(False)) == ["gone"]
    assert asyncio.run(story(True)) == []
