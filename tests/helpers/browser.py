"""Read the requests of a page from Chromium's performance log."""

from __future__ import annotations

import json
from typing import Any

# Documents of the browser itself, such as its start page, which some builds load at any moment.
BROWSER_DOCUMENTS = ("chrome:", "chrome-untrusted:", "chrome-extension:", "devtools:")


def page_requests(driver: Any) -> list[str]:
    """Return the URLs requested since the log was last read, except by the browser's own documents."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [r["request"]["url"] for r in requests if not r["documentURL"].startswith(BROWSER_DOCUMENTS)]
