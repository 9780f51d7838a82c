from peers.zoo import table
from tests.helpers import ROOT


def test_the_page_shows_the_peers_as_they_are():
    assert table() in (ROOT / "docs" / "peers.md").read_text("utf-8")
