"""Files over HTTP against a server on the loopback device: cut off, overloaded, gated, gone."""

import gzip
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import remote
from data.config import load_config
from data.errors import DataError
from data.inputs import list_inputs
from data.prepare import prepare
from data.remote import HttpFile, open_url

REVISION = "7f48140530a023e9ea4c5cfb141160922727d4d3"


class FakeHub:
    """``files``: path -> content. ``troubles``: what the next requests for a file meet, in turn."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.troubles: list[int | str] = []
        self.token: str | None = None  # demanded for /datasets/
        self.seen: list[tuple[str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self)

            def do_HEAD(self):
                hub.answer(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request) -> None:
        path = request.path.partition("?")[0]
        authorization = request.headers.get("Authorization")
        self.seen.append((path, authorization))
        if path.startswith("/api/datasets/"):
            repo = path.removeprefix("/api/datasets/").partition("/revision/")[0]
            start = f"/datasets/{repo}/resolve/{REVISION}/"
            names = [name.removeprefix(start) for name in self.files if name.startswith(start)]
            siblings = [{"rfilename": name} for name in names]
            body = json.dumps({"id": repo, "sha": REVISION, "siblings": siblings}).encode()
            return self.send(request, 200, body)
        if self.token and path.startswith("/datasets/") and authorization != f"Bearer {self.token}":
            return self.send(request, 401, b"")
        trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, int):
            return self.send(request, trouble, b"", {"Retry-After": "1"})
        if path not in self.files:
            return self.send(request, 404, b"")
        content = self.files[path]
        start = int(request.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        body = content[start:]
        return self.send(request, 206, body, headers, len(body) // 3 if trouble == "cut" else None)

    def send(self, request, status, body, headers=None, cut=None) -> None:
        request.send_response(status)
        for key, value in (headers or {}).items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body if cut is None else body[:cut])


@pytest.fixture
def hub(monkeypatch):
    fake = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    fake.slept = []
    monkeypatch.setattr(remote.time, "sleep", fake.slept.append)
    yield fake
    fake.server.shutdown()


CONTENT = random.Random(0).randbytes(3_000_000)


def test_case_20_every_byte_once_through_resets_429_and_502(hub):
    hub.files["/a"] = CONTENT
    hub.troubles = [429, "cut", 502, "cut", 503, "cut", None]
    with open_url(f"{hub.url}/a") as file:
        assert file.read() == CONTENT
    assert len(hub.slept) == 6
    assert hub.slept[0] >= 1.0  # Retry-After
    assert all(pause <= remote.LONGEST_PAUSE for pause in hub.slept)


def test_seeks_and_a_server_without_ranges(hub, monkeypatch):
    hub.files["/a"] = CONTENT
    with open_url(f"{hub.url}/a") as file:
        file.seek(-10, 2)
        assert file.read() == CONTENT[-10:]
        file.seek(1_000_000)
        assert file.read(7) == CONTENT[1_000_000:1_000_007]
    send = hub.send
    plain = lambda r, s, body, h=None, c=None: send(r, 200, CONTENT)  # noqa: E731
    monkeypatch.setattr(hub, "send", plain)
    with open_url(f"{hub.url}/a") as file:
        file.seek(2_000_000)
        assert file.read() == CONTENT[2_000_000:]


def test_it_gives_up_after_many_failures(hub):
    hub.files["/a"] = CONTENT
    hub.troubles = [503] * 100
    with pytest.raises(DataError, match="HTTP 503, 8 times in a row"):
        HttpFile(f"{hub.url}/a")
    assert hub.slept[-1] > hub.slept[0]


def test_case_21_a_file_that_is_gone(hub):
    with pytest.raises(DataError, match=r"is gone \(HTTP 404\); give the source a `mirror`"):
        HttpFile(f"{hub.url}/nothing")
    assert not hub.slept


def corpus(tmp_path, dataset, source=""):
    path = tmp_path / "hub.toml"
    path.write_text(
        "seq_len = 8\nseed = 1\nvalidation_fraction = 0.5\nshard_tokens = 1000\n"
        "[tokenizer]\ntrain_vocab_size = 300\n\n"
        f'[[sources]]\nname = "case"\ntokens = 1000\ndataset = "{dataset}"\n{source}\n'
    )
    return path


def hub_file(hub, repo, name, content):
    hub.files[f"/datasets/{repo}/resolve/{REVISION}/{name}"] = content


def test_case_19_a_gated_dataset_names_terms_and_variable(hub, tmp_path, monkeypatch):
    sink = pa.BufferOutputStream()
    texts = [f"text number {i} of the file" for i in range(60)]
    pq.write_table(pa.table({"content": texts, "id": texts}), sink)
    content = sink.getvalue().to_pybytes()
    hub_file(hub, "bigcode/starcoderdata", "python/train-00000-of-00059.parquet", content)
    hub.token = "hf_secret"
    path = corpus(tmp_path, "starcoderdata")
    with pytest.raises(DataError) as error:
        prepare(path, tmp_path / "out")
    for part in ("https://huggingface.co/datasets/bigcode/starcoderdata", "HF_TOKEN", "accept"):
        assert part in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.troubles = ["cut"] * 3
    manifest = prepare(path, tmp_path / "out")
    (origin,) = manifest.sources[0]["inputs"]
    assert origin["origin"].startswith(f"bigcode/starcoderdata@{REVISION}: python/")
    assert sum(split["documents"] for split in manifest.splits.values()) == 60


def test_hub_and_mirror_give_the_same_tokens(hub, tmp_path):
    name = "data/v2/train-00000-of-00020.json.gz"
    rows = [{"text": f"paper number {i}", "id": str(i)} for i in range(50)]
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    hub_file(hub, "allenai/peS2o", name, content)
    (tmp_path / "mirror" / name).parent.mkdir(parents=True)
    (tmp_path / "mirror" / name).write_bytes(content)
    streamed = prepare(corpus(tmp_path, "pes2o"), tmp_path / "streamed")
    source = f'mirror = "{tmp_path}/mirror"'
    local = prepare(corpus(tmp_path, "pes2o", source), tmp_path / "local")
    assert [shard.sha256 for shard in streamed.shards] == [shard.sha256 for shard in local.shards]


def test_dolma_is_its_list_and_the_token_stays_with_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    urls = "".join(f"{hub.url}/dolma-v1_7/{f}/{f}-0000.json.gz\n" for f in ("books", "starcoder"))
    hub_file(hub, "allenai/dolma", "urls/v1_6-sample.txt", urls.encode())
    hub.files["/dolma-v1_7/books/books-0000.json.gz"] = b"x"
    items, _ = list_inputs(load_config(corpus(tmp_path, "dolma")))
    assert [item.place for item in items] == [f"{hub.url}/dolma-v1_7/books/books-0000.json.gz"]
    sent = dict(hub.seen)
    assert sent["/dolma-v1_7/books/books-0000.json.gz"] is None
    assert sent[f"/datasets/allenai/dolma/resolve/{REVISION}/urls/v1_6-sample.txt"] is not None


def test_without_a_network_the_message_names_the_ways_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be reached at http://127\.0\.0\.1:9 .*`mirror`"):
        list_inputs(load_config(corpus(tmp_path, "fineweb")))
