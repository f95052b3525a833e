"""Our loader against torchtitan's own text dataset, on the same documents."""

import json
import random

import numpy as np

from data.encode import decode, load_encoder
from data.loader import ShardLoader
from data.order import shuffled
from data.prepare import prepare

SEQ_LEN, SEED = 24, 9


def test_same_samples_as_torchtitans_text_dataset(tmp_path):
    from topoep_titan.titan import device

    device.install()
    from datasets import Dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

    draw = random.Random(0)
    (tmp_path / "texts").mkdir()
    for number in range(60):
        words = ["".join(draw.choices("abcdeé集群", k=4)) for _ in range(draw.randrange(1, 60))]
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(" ".join(words))
    path = tmp_path / "parity.toml"
    path.write_text(
        f"seq_len = {SEQ_LEN}\nseed = 1\nvalidation_fraction = 0.1\nshard_tokens = 1_000_000\n"
        "[tokenizer]\ntrain_vocab_size = 300\n[[sources]]\nname = 'hand'\ntokens = 1_000_000\n"
        f"files = '{tmp_path}/texts/*.txt'\nlicence = 'CC0-1.0'\n"
    )
    out = tmp_path / "out"
    manifest = prepare(path, out)
    ours = ShardLoader(out, "train", SEED, 0, 1, 1, SEQ_LEN, infinite=False)
    encoder = load_encoder(out / "tokenizer.json", manifest.tokenizer["eos"])
    texts = [
        decode(encoder, ids[:-1])
        for ids in np.split(ours.shards.tokens[0], ours.shards.first[0][1:])
    ]
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((out / "tokenizer.json").read_bytes())
    eos = {"eos_token": manifest.tokenizer["eos"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(eos))
    DATASETS["parity"] = DatasetConfig(
        "", lambda _: Dataset.from_dict({"text": texts}), lambda sample: sample["text"]
    )
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizer.Config(), tokenizer_path=str(folder))
    theirs = [
        (inputs["input"].tolist(), labels.tolist(), inputs["positions"].tolist())
        for inputs, labels in HuggingFaceTextDataset("parity", None, tokenizer, SEQ_LEN)
    ]
    assert len(theirs) == ours.sequences > 50
    order = shuffled(np.arange(len(theirs)), len(theirs), SEED, epoch=0)
    for batch, sequence in zip(ours, order, strict=True):
        own = (batch.inputs_BL[0], batch.labels_BL[0], batch.positions_BL[0])
        assert tuple(array.tolist() for array in own) == theirs[sequence]
