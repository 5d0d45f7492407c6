from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from triaccel_ray.trainables.bert import ClassifiedWindows, TextBert, lexical_classes
from triaccel_ray.trainables.task import Purpose


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (b"x = 1  # one\n", b"1060300555550"),
        (b"def f(a):\n    return -a\n", b"222016166000002222220610"),
        (b"'''two\nlines''' + name\n", b"44444444444444406011110"),
        (b'f"a{b}c" if x else 0.5\n', None),  # the parts of a formatted string are tokens since Python 3.12
        ("x = 'é'\n".encode(), b""),
        (b"def f(:\n    'never closed\n", b""),
        (b"if x:\n  a\n b\n", b""),
    ],
)
def test_every_byte_has_the_class_of_its_token(code: bytes, expected: bytes | None) -> None:
    classes = lexical_classes(code)
    if expected == b"":
        assert classes is None
        return
    assert classes is not None
    assert len(classes) == len(code)
    found = "".join(str(each) for each in classes).encode()
    if expected is None:
        assert found.startswith(b"44")
        assert found.endswith(b"022010222203330")
    else:
        assert found == expected


def test_targets_are_the_classes_of_the_inputs_bytes_and_files_that_are_not_python_are_left_out(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"{index}.py").write_text(f"value{index} = {index}  # {'a comment, ' * 12}\n" * 4)
        (tmp_path / f"{index}.txt").write_text("no Python: 'never closed\n" * 4)
    source = TextBert(tmp_path).data(Purpose.SEARCH).train
    assert isinstance(source, ClassifiedWindows)
    assert b"never closed" not in bytes(source.text.tolist())
    inputs, targets = source.to(torch.device("cpu")).batch(torch.arange(len(source)), None)
    assert inputs.shape == targets.shape == (len(source), 64)
    assert torch.equal(inputs.flatten(), source.text[: inputs.numel()].long())
    assert torch.equal(targets.flatten(), source.classes[: inputs.numel()].long())
    assert (targets[inputs == ord("#")] == 5).all()


def test_without_python_files_or_transformers_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(12):
        (tmp_path / f"{index}.txt").write_text("no Python: 'never closed\n" * 4)
    with pytest.raises(ValueError, match=r"files = 8: must hold some that are Python in ASCII; name another --data"):
        TextBert(tmp_path).data(Purpose.SEARCH)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"text-bert needs .*: pip install 'triaccel-ray\[transformers\]'"):
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
