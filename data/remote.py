"""Files of the hub and of any web server as seekable files that survive a bad connection.

A broken transfer, a 429 or a 5xx is tried again after a growing, jittered pause and goes on at the
same byte, so the reader behind it never notices and no record is lost or read twice.

Untested against the live hub: the tests run against a server on the loopback device.
"""

import io
import os
import random
import re
import time
import urllib.error
import urllib.request
from http.client import HTTPException

from data.errors import DataError

ATTEMPTS = 8  # in a row without a single byte; pauses of 1, 2, 4, ... 60 s: about three minutes
LONGEST_PAUSE = 60.0  # seconds
TIMEOUT = 60.0  # seconds without a byte
TOKEN = "HF_TOKEN"  # the hub's own variable


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hub_url(repo: str, revision: str, path: str) -> str:
    return f"{endpoint()}/datasets/{repo}/resolve/{revision}/{path}"


def hub_files(repo: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit that ``revision`` (None: the newest) names, and its files, sorted.

    Raises DataError when the hub does not know or does not show the repository.
    """
    from huggingface_hub import HfApi  # slow to import, and a mirror does not need it
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi(endpoint(), token=os.environ.get(TOKEN)).dataset_info(repo, revision=revision)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise DataError(_closed(repo)) from None
        raise DataError(
            f"the hub has no dataset {repo} at revision {revision or 'main'} ({status}); correct "
            "`revision`, or give a `mirror`"
        ) from None
    except Exception as error:  # the client's transport errors have no common class
        raise DataError(
            f"the hub cannot be reached at {endpoint()} ({type(error).__name__}: {error}); check "
            "the network, set HF_ENDPOINT, or give every source a `mirror`"
        ) from None
    return info.sha, sorted(sibling.rfilename for sibling in info.siblings)


class HttpFile(io.RawIOBase):
    """Read-only. ``repo`` names the hub's dataset, for the messages and for the token."""

    def __init__(self, url: str, repo: str | None = None):
        self.url, self.repo = url, repo
        self.position, self.size = 0, None
        self._response, self._etag = None, None
        self._connect()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        if start + offset != self.position:
            self._disconnect()
            self.position = start + offset
        return self.position

    def readinto(self, buffer) -> int:
        failures = 0
        while self.position < self.size:
            try:
                if self._response is None:
                    self._connect()
                count = self._response.readinto(buffer)
                if count:
                    self.position += count
                    return count
                reason = "the connection closed early"
            except (OSError, HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            self._disconnect()
            failures += 1
            _pause(self.url, failures, reason, None)
        return 0

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _connect(self) -> None:
        """Open at ``position``. Raises DataError for what another attempt would not change."""
        failures = 0
        while True:
            try:
                request = urllib.request.Request(
                    self.url, headers={"Range": f"bytes={self.position}-"}
                )
                if self.repo and os.environ.get(TOKEN):
                    # not sent on when the hub redirects to its storage, which signs its own URLs
                    request.add_unredirected_header("Authorization", f"Bearer {os.environ[TOKEN]}")
                response = urllib.request.urlopen(request, timeout=TIMEOUT)
                break
            except urllib.error.HTTPError as error:
                self._give_up_at(error.code)
                reason, after = f"HTTP {error.code}", error.headers.get("Retry-After")
            except (OSError, HTTPException) as error:  # URLError is an OSError
                reason, after = f"{type(error).__name__}: {error}", None
            failures += 1
            _pause(self.url, failures, reason, after)
        etag = response.headers.get("ETag")
        if self._etag not in (None, etag):
            raise DataError(f"{self.url} changed while it was read; run the command again")
        self._response, self._etag = response, etag
        whole = re.search(r"/(\d+)$", response.headers.get("Content-Range", ""))
        self.size = int(whole[1] if whole else response.headers["Content-Length"])
        if not whole and self.position:  # a server without ranges: read up to the place
            response.read(self.position)

    def _give_up_at(self, status: int) -> None:
        if status in (401, 403):
            raise DataError(_closed(self.repo or self.url)) from None
        if status in (404, 410):
            raise DataError(
                f"{self.url} is gone (HTTP {status}); give the source a `mirror` with the files, "
                "or another `revision` or `variant`"
            ) from None
        if status == 416:
            raise DataError(f"{self.url} is shorter than {self.position} bytes") from None
        if status < 500 and status not in (408, 425, 429):
            raise DataError(f"{self.url} answers HTTP {status}") from None

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None


def open_url(url: str, repo: str | None = None) -> io.BufferedReader:
    return io.BufferedReader(HttpFile(url, repo), buffer_size=2**20)


def _pause(url: str, failures: int, reason: str, after: str | None) -> None:
    """Wait before attempt ``failures + 1``, at least what the server asks for."""
    if failures >= ATTEMPTS:
        raise DataError(
            f"{url}: {reason}, {failures} times in a row; the same command goes on where it stopped"
        )
    seconds = min(LONGEST_PAUSE, 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
    if after and after.isdigit():
        seconds = max(seconds, min(float(after), LONGEST_PAUSE))
    print(f"read: {url}: {reason}; again in {seconds:.1f} s", flush=True)
    time.sleep(seconds)


def _closed(repo: str) -> str:
    return (
        f"{repo} is gated: log in, accept its terms at https://huggingface.co/datasets/{repo}, and "
        f"set {TOKEN} to a token of that account; or give the source a `mirror`"
    )
