"""Hugging Face transformers: a registered Sinkhorn attention, from a folder and back into the library."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analyses import analysed
from torch import nn

import asapc
from asapc.errors import InputError
from asapc.formats.user_code import UserCode
from asapc.inputs.load import load_teacher
from asapc.program import compiled as compiled_model

transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "transformers"
ATTENTION = f"{EXAMPLE}/sinkhorn_attention.py:sinkhorn"
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16,
    "vocab_size": 60, "max_position_embeddings": 32, "num_labels": 3, "attn_implementation": "registered",
    "attention_probs_dropout_prob": 0.0,  # or the code of BERT itself runs in training mode
}  # fmt: skip
N = 12


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """As a user registers an attention."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    transformers.AttentionInterface.register("registered", UserCode(ATTENTION, "attention").target)
    AttentionMaskInterface.register("registered", eager_mask)


def sharp(model: nn.Module) -> nn.Module:
    """Seeded weights under which attention is far from uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                gain = 3.0 if any(part in name for part in ("query", "key", "q_proj", "k_proj")) else 1.0
                scale = gain / weight.shape[-1] ** 0.5
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return model.eval()


def bert(**options: Any) -> Any:
    config = transformers.BertConfig(**{**SIZES, "id2label": {0: "a", 1: "b", 2: "c"}, **options})
    return sharp(transformers.BertForSequenceClassification(config))


def tokens(count: int = 120) -> dict[str, np.ndarray[Any, Any]]:
    """Padded texts of 4 to N tokens."""
    draw = np.random.default_rng(0)
    mask = (np.arange(N) < draw.integers(4, N + 1, (count, 1))).astype(np.int64)
    return {"input_ids": draw.integers(1, 60, (count, N)) * mask, "attention_mask": mask}


def batch(count: int = 5, start: int = 0) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value[start : start + count]) for key, value in tokens().items()}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    place = tmp_path_factory.mktemp("bert") / "out"
    asapc.compile(bert(), tokens(), recipe={"operator": "sinkhorn"}, out=place, examples=16)
    return place


@pytest.fixture
def folder(tmp_path):
    bert().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_outputs_are_the_librarys_own(out):
    given, expected = batch(7, 20), bert()(**batch(7, 20))
    found = asapc.load(out)(**given)
    assert type(found) is type(expected) and list(found) == ["logits"] and found.loss is None
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-4)


def test_without_the_library_they_are_a_mapping(out, monkeypatch):
    monkeypatch.setattr(compiled_model, "types_at_hand", lambda tree: {})
    found = asapc.load(out)(**batch())
    assert type(found) is dict and list(found) == ["logits"]


def test_a_patched_model_is_saved_and_goes_into_a_pipeline(out, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "word": 2, "another": 3}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")
    live = asapc.load(out, model=bert())
    assert type(live) is transformers.BertForSequenceClassification
    texts = ["word another word word", "another word"]

    def said(model: nn.Module, **options: Any) -> list[float]:
        run = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, **options)
        return [entry["score"] for entry in run(texts)]

    with warnings.catch_warnings(action="error", category=compiled_model.OwnCodeWarning):
        # One text at a time has no padding: transformers passes no mask at all.
        for options in ({}, {"batch_size": 2}):
            assert said(live, **options) == pytest.approx(said(bert(), **options), abs=1e-5)
    live.save_pretrained(tmp_path)  # type: ignore[operator]
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path).state_dict()
    expected = bert().state_dict()
    assert list(again) == list(expected)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_a_patched_model_trains_and_gives_its_maps(out):
    live, exact = asapc.load(out, model=bert()), bert()(**batch(), output_attentions=True)
    patched = [name for name, layer in live.named_modules() if "forward" in vars(layer)]
    assert patched == ["bert.encoder.layer.0.attention.self"]
    with warnings.catch_warnings(action="error", category=compiled_model.OwnCodeWarning):
        live.gradient_checkpointing_enable()  # type: ignore[operator]
        live.train()(**batch(), labels=torch.zeros(5).long()).loss.backward()
    found = live.eval()(**batch(), output_attentions=True)
    torch.testing.assert_close(found.logits, exact.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.attentions, exact.attentions, atol=1e-5, rtol=1e-4)


def test_a_folder_is_a_model_and_its_attention_is_named(folder):
    teacher = load_teacher(str(folder), kwargs={"attention": ATTENTION})
    assert type(teacher.model) is transformers.BertForSequenceClassification
    assert teacher.model is not None and not teacher.model.training and not teacher.builtin
    torch.testing.assert_close(teacher.model(**batch()).logits, bert()(**batch()).logits)
    assert teacher.fingerprint == load_teacher(str(folder)).fingerprint


def test_a_folder_may_hold_its_weights_in_parts(folder):
    bert().save_pretrained(folder, max_shard_size="4KB")
    (folder / "model.safetensors").unlink()
    model = load_teacher(str(folder), kwargs={"attention": ATTENTION}).model
    assert model is not None and torch.equal(model(**batch()).logits, bert()(**batch()).logits)


def _edited(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _shard(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"classifier.bias": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


REFUSED: dict[str, tuple[Any, str]] = {
    "pickled": (lambda f: (f / "model.safetensors").rename(f / "model.bin"), "writes safetensors"),
    "another class": (lambda f: _edited(f, architectures=["BertForMaskedLM"]), "model must agree"),
    "no class": (lambda f: _edited(f, architectures=["Bart4"]), "must name a class of transformers"),
    "a helper": (lambda f: _edited(f, architectures=["pipeline"]), "must name a class of transformers"),
    "wrong sizes": (lambda f: _edited(f, hidden_size=24), "."),
    "wrong type": (lambda f: _edited(f, num_hidden_layers="two"), "from_pretrained reads"),
    "a part elsewhere": (lambda f: _shard(f, "../other.safetensors"), "files in the folder"),
    "a pickled part": (lambda f: _shard(f, "part.bin"), "files in the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_does_not_fit_is_one_message(folder, case):
    damage, message = REFUSED[case]
    damage(folder)
    with pytest.raises(InputError, match=message):
        load_teacher(str(folder))


def test_a_folder_takes_an_attention_and_nothing_else(folder):
    with pytest.raises(InputError, match="only set attention, got depth"):
        load_teacher(str(folder), kwargs={"depth": 3})
    with pytest.raises(InputError, match="no such file"):
        load_teacher(str(folder), kwargs={"attention": "nowhere.py:sinkhorn"})


def test_code_in_a_folder_runs_only_if_it_is_trusted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    marker = tmp_path / "ran"
    (folder / "theirs.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import BertForSequenceClassification\n"
        "class Theirs(BertForSequenceClassification):\n    pass\n"
    )
    _edited(folder, architectures=["Theirs"], auto_map={"AutoModel": "theirs.Theirs"})
    with pytest.raises(InputError, match="--trust-remote-code"):
        load_teacher(str(folder))
    assert not marker.exists()
    model = load_teacher(str(folder), remote_code=True).model
    assert type(model).__name__ == "Theirs" and marker.exists()
    _edited(folder, auto_map={"AutoModel": "somebody/elses--theirs.Theirs"})
    with pytest.raises(InputError, match="code in the folder"):
        load_teacher(str(folder), remote_code=True)


def test_a_configuration_names_no_code_of_others(folder, monkeypatch):
    """transformers would fetch a kernel from the hub, and run it."""
    tried: list[Any] = []
    monkeypatch.setattr("socket.socket.connect", lambda self, place: tried.append(place))
    for value in ("kernels-community/flash-attn", {"": "somebody/kernel"}):
        _edited(folder, attn_implementation=value, _attn_implementation=value)
        model = load_teacher(str(folder)).model
        assert model is not None and model.config._attn_implementation in ("sdpa", "eager")
    assert not tried
    _edited(folder, attn_implementation="registered")
    model = load_teacher(str(folder)).model
    assert model is not None and torch.equal(model(**batch()).logits, bert()(**batch()).logits)
    _edited(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(InputError, match="quantization_config"):
        load_teacher(str(folder))


def test_grouped_queries_with_an_additive_mask_match():
    config = transformers.EuroBertConfig(**{
        **SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "mask_token_id": 3,
    })  # fmt: skip
    found = analysed(sharp(transformers.EuroBertForSequenceClassification(config)), **batch(4))
    (site,) = found.sites
    assert (site.name, site.heads, site.convention.mask) == ("model.layers.0.self_attn", 4, "key")
    assert site.loop.half_steps == 9 and found.replayed.output_error < 1e-5


def test_a_folder_for_those_with_asapc_and_those_without(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    out, saved = tmp_path / "out", tmp_path / "saved"
    teacher = load_teacher(str(folder), kwargs={"attention": ATTENTION})
    asapc.compile(teacher.model, tokens(), recipe={"operator": "sinkhorn"}, out=out, examples=16)
    with pytest.raises(InputError, match="the original must be a transformers folder"):
        asapc.save_pretrained(out, saved)
    asapc.save_pretrained(out, saved, model=folder)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (saved / name).read_bytes() == (folder / name).read_bytes()
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        saved, attn_implementation="registered"
    )
    assert all(torch.equal(plain.state_dict()[name], t) for name, t in bert().state_dict().items())
    expected = bert()(**batch()).logits
    alone, live = asapc.from_pretrained(saved), asapc.from_pretrained(saved, attention=ATTENTION)
    assert type(live) is transformers.BertForSequenceClassification and type(alone) is not type(live)
    assert "AttentionInterface.register" in (saved / "asapc" / "README.md").read_text()
    for model in (alone, live):
        torch.testing.assert_close(model(**batch()).logits, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(InputError, match="asapc replaces only folders that it wrote"):
        asapc.save_pretrained(out, saved, model=folder)
    bert(num_labels=3, hidden_size=32).save_pretrained(folder)
    with pytest.raises(InputError, match="was compiled from, got others"):
        asapc.save_pretrained(out, tmp_path / "other", model=folder)
