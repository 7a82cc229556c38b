"""Hugging Face as it is: data sets, transformers and peft, without any download."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedhelix import Federation, UserError, from_arrays, partition
from fedhelix.core.tree import flatten, payload_bytes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WORDS, CLASSES, RANK, WIDTH, LAYERS = 30, 3, 2, 16, 2

face = SimpleNamespace()  # Hugging Face's packages


@pytest.fixture(scope="module", autouse=True)
def hugging_face():
    """Imported here: collecting the fast tests should not take the seconds that this takes."""
    for name in ("datasets", "transformers", "peft"):
        setattr(face, name, pytest.importorskip(name))


def test_a_stream_is_refused():
    rows = {"x": [[1.0, 2.0], [2.0, 3.0]] * 9, "label": [0, 1] * 9}
    stream = face.datasets.Dataset.from_dict(rows).to_iterable_dataset()
    for data in (stream, [stream]):
        with pytest.raises(UserError, match=r"a stream without a length \(IterableDataset\); load"):
            Federation(data)


def configuration() -> object:
    return face.transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )


def adapted() -> torch.nn.Module:
    """A tiny BERT with LoRA on queries and values; its classifier trains, too."""
    rule = face.peft.LoraConfig(
        task_type="SEQ_CLS", r=RANK, target_modules=["query", "value"], lora_dropout=0.0
    )
    return face.peft.get_peft_model(
        face.transformers.BertForSequenceClassification(configuration()), rule
    )


def texts(rows: int = 48) -> object:
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, 9, rows)
    ids = [draw.integers(0, WORDS, length).tolist() for length in lengths]
    return face.datasets.Dataset.from_dict(
        {
            "input_ids": ids,
            "attention_mask": [[1] * len(one) for one in ids],
            "writer": [f"writer {place % 3}" for place in range(rows)],
            "label": [one[0] % CLASSES for one in ids],
        }
    )


def federation(engine: str) -> Federation:
    usual = {"epochs": 1, "batch_size": 8, "lr": 0.1, "cohort": 3, "kernels": "onednn"}
    return Federation(texts(), partition.natural("writer"), model=adapted, engine=engine, **usual)


def test_only_adapters_and_classifier_travel_and_engines_agree():
    one, other = (federation(engine).fit(2, quiet=True) for engine in ("serial", "batched"))
    trained = LAYERS * 2 * RANK * (WIDTH + WIDTH) + CLASSES * (WIDTH + 1)
    assert one.records[0]["uplink_bytes"] == 3 * 4 * trained
    assert payload_bytes(one.state.server) == 4 * trained
    for name, value in flatten(one.state.server).items():
        assert torch.allclose(value, flatten(other.state.server)[name], atol=1e-5), name


def test_predictions_take_the_columns_that_the_network_was_trained_on():
    fed = federation("serial")
    run, asked = fed.fit(1, quiet=True), texts().select(range(5))
    parts = {name: list(asked[name]) for name in ("input_ids", "attention_mask")}
    expected = run.predict(parts, client="writer 1", raw=True)
    assert np.allclose(run.predict(asked, client="writer 1", raw=True), expected)


def test_what_was_trained_is_saved_and_loaded_by_peft(tmp_path):
    fed = federation("serial")
    model = fed.fit(1, quiet=True).model()
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = face.transformers.BertForSequenceClassification(configuration())
    frozen = {name: fed.engine.setup.module.get_parameter(name) for name in fed.layers.frozen}
    prefix, inserted = "base_model.model.", (".base_layer", ".original_module")
    for name, value in frozen.items():
        plain = name.removeprefix(prefix)
        for part in inserted:
            plain = plain.replace(part, "")
        base.get_parameter(plain).data.copy_(value)
    again = face.peft.PeftModel.from_pretrained(base, tmp_path).eval()
    batch = fed.data.prepare(fed.data.x_test[:4])
    with torch.no_grad():
        assert torch.allclose(again(**batch).logits, model(**batch).logits, atol=1e-5)


def test_tokenized_text_trains_a_network_that_from_pretrained_loads(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "good": 1, "bad": 2}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = face.transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    columns = {"text": ["good good", "bad", "good bad"], "label": [1, 0, 2], "writer": [0, 1, 1]}
    data = face.datasets.Dataset.from_dict({name: 8 * rows for name, rows in columns.items()})
    data = data.map(lambda row: tokenizer(row["text"]), remove_columns="text")
    kind = face.transformers.AutoModelForSequenceClassification
    fed = Federation(data, partition.natural("writer"), model=kind.from_config(configuration()))
    run, asked = fed.fit(1, quiet=True), tokenizer(["good", "bad bad"], padding=True)
    batch = {name: torch.tensor(asked[name]) for name in ("input_ids", "attention_mask")}
    for model in (run.model(), run.personal_model(1)):
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            again = kind.from_pretrained(tmp_path)(**batch).logits
            assert torch.allclose(again, model.eval()(**batch).logits, atol=1e-5)


@pytest.mark.parametrize("task", ["classes", "next token"])
def test_a_program_of_a_transformer_needs_no_transformers(task, tmp_path):
    tokens = np.random.default_rng(0).integers(1, WORDS, (20, 8))
    y = tokens if task == "next token" else tokens[:, 0] % CLASSES
    model = face.transformers.BertForSequenceClassification(configuration())
    if task == "next token":
        sizes = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        model = face.transformers.GPT2LMHeadModel(face.transformers.GPT2Config(**sizes))
    data = from_arrays({"input_ids": tokens}, y)
    run = Federation(data, "iid", clients=2, model=model, kernels="onednn").fit(1, quiet=True)
    run.export(tmp_path, "torch")
    program = (
        "import sys, numpy as np, torch\n"
        "tokens = torch.from_numpy(np.load('tokens.npy'))\n"
        "program = torch.export.load('model.pt2').module()\n"
        "np.save('outputs.npy', program(input_ids=tokens).detach().numpy())\n"
        "assert 'transformers' not in sys.modules\n"
    )
    np.save(tmp_path / "tokens.npy", tokens)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    expected = run.predict({"input_ids": tokens}, raw=True)
    assert np.allclose(np.load(tmp_path / "outputs.npy"), expected, atol=1e-5)
