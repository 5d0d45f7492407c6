from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from triaccel_ray.trainables import bert
from triaccel_ray.trainables.bert import ClassifiedWindows, TextBert, lexical_classes
from triaccel_ray.trainables.task import Purpose


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (b"x = 1  # one\n", "1060300555550"),
        (b"def f(a):\n    return -a\n", "222016166000002222220610"),
        (b"'''two\nlines''' + name\n", "44444444444444406011110"),
        (b'f"a" if x else 0.5\n', "4444022010222203330"),  # of several tokens since Python 3.12
        (b"f'{{a}}' + b\n", "4444444406010"),  # two braces that stand for one
        (b"# Encoding: hex\nx\n", "555555555555555010"),
    ],
)
def test_every_byte_has_the_class_of_its_token(code: bytes, expected: str) -> None:
    classes = lexical_classes(code)
    assert classes is not None
    assert "".join(map(str, classes)) == expected


@pytest.mark.parametrize("code", ["x = 'é'\n".encode(), b"def f(:\n    'never closed\n", b"if x:\n  a\n b\n"])
def test_code_that_is_not_python_in_ascii_has_no_classes(code: bytes) -> None:
    assert lexical_classes(code) is None


def test_targets_are_the_classes_of_the_inputs_bytes_and_files_that_are_not_python_are_left_out(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"{index}.py").write_text(f"value{index} = {index}  # {'a comment, ' * 12}\n" * 4)
        (tmp_path / f"{index}.txt").write_text("prose and no code\n" * 4)
        (tmp_path / f"x{index}.py").write_text("def f(: 'never closed\n" * 4)
    source = TextBert(tmp_path).data(Purpose.SEARCH).train
    assert isinstance(source, ClassifiedWindows)
    assert not any(word in bytes(source.text.tolist()) for word in (b"prose", b"closed"))
    inputs, targets = source.to(torch.device("cpu")).batch(torch.arange(len(source)), None)
    assert inputs.shape == targets.shape == (len(source), 64)
    assert torch.equal(inputs.flatten(), source.text[: inputs.numel()].long())
    assert torch.equal(targets.flatten(), source.classes[: inputs.numel()].long())
    assert (targets[inputs == ord("#")] == 5).all()


def test_without_python_files_or_transformers_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(12):
        (tmp_path / f"{index}.txt").write_text("prose and no code\n" * 4)
    with pytest.raises(FileNotFoundError, match=r"holds 0 files with text, named \*.py: must hold at least 3"):
        TextBert(tmp_path).data(Purpose.SEARCH)
    for index in range(3):
        (tmp_path / f"{index}.py").write_text("def f(: 'never closed\n" * 4)
    with pytest.raises(ValueError, match="files = 1: must hold some that are Python in ASCII; name another"):
        TextBert(tmp_path).data(Purpose.SEARCH)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"text-bert needs .*transformers: pip install transformers"):
        TextBert().model()


def test_bytes_on_both_sides_change_a_bytes_logits() -> None:
    torch.manual_seed(0)
    task = TextBert()
    model, inputs = task.model().eval(), torch.randint(0, 256, (2, 64))
    logits = model(inputs)
    assert logits.shape == (2, 64, 7)
    for changed_place in (0, 63):
        changed = inputs.clone()
        changed[:, changed_place] = (changed[:, changed_place] + 1) % 256
        assert not torch.allclose(model(changed)[:, 31], logits[:, 31])


def test_no_more_files_are_classified_than_the_windows_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(TextBert):
        most_windows = 8

    for index in range(40):
        (tmp_path / f"{index}.py").write_text(f"value = {index}\n" * 20)
    classified: list[bytes] = []
    monkeypatch.setattr(bert, "lexical_classes", lambda code: classified.append(code) or lexical_classes(code))
    train = Few(tmp_path).data(Purpose.SEARCH).train
    assert len(train) == 8
    assert len(classified) < 10
