"""The GPT benchmark: it learns, resumes exactly, proves its checkpoint, refuses bad options in one line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TINY = "--batch 5 --chunks 2 --context 16 --width 16 --heads 2 --layers 2 --lr 0.1 --devices cpu cpu".split()

wrapped_or_not = pytest.mark.parametrize(
    "mode", [[], ["--schedule", "v-half"], ["--unwrapped"]], ids=["wrapped", "scheduled", "unwrapped"]
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, with less of the text held out and one thread: the models are tiny."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("train_gpt")
    train, held_out = module.text.load()
    monkeypatch.setattr(module.text, "load", lambda: (train, held_out[:400]))
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def losses(printed: str) -> list[float]:
    """The held-out losses, one a line that begins with a step."""
    return [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]


def checkpoint(path: Path) -> dict[str, object]:
    return torch.load(path, weights_only=True)


def assert_identical(found: object, expected: object) -> None:
    """The same nesting of dicts and lists with the same tensors in it, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor) and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys()
        for key in expected:
            assert_identical(found[key], expected[key])
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_identical(one, other)
    else:
        assert found == expected


@wrapped_or_not
def test_held_out_loss_falls(script, tmp_path, capsys, mode):
    options = [*TINY, *mode, "--steps", "20", "--eval-every", "10", "--save", str(tmp_path / "a.pt")]
    assert script.main(options) == 0
    before, during, after = losses(capsys.readouterr().out)
    assert before > during > after
    assert after < before - 1


@pytest.mark.parametrize("schedule", ["v-half", "1f1b"])
def test_schedule_trains_to_the_same_loss_as_drop_in(script, tmp_path, capsys, schedule):
    options = [*TINY, "--steps", "12", "--eval-every", "4", "--save", str(tmp_path / "a.pt")]
    found = []
    for more in ([], ["--schedule", schedule]):
        assert script.main([*options, *more]) == 0
        printed = capsys.readouterr().out
        found.append([*losses(printed), float(printed.split()[-3].rstrip(","))])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0][-1] < found[0][0] - 0.5


def test_checkpointing_is_left_to_the_schedule(script, tmp_path, monkeypatch):
    modes, wrap = [], script.SplitPipe

    def noted(*args, **options):
        model = wrap(*args, **options)
        modes.append(model.checkpoint)
        return model

    monkeypatch.setattr(script, "SplitPipe", noted)
    for more in ([], ["--schedule", "v-half"], ["--schedule", "v-half", "--checkpoint", "always"]):
        assert script.main([*TINY, *more, "--steps", "1", "--save", str(tmp_path / "a.pt")]) == 0
    assert modes == ["except_last", "never", "always"]


def test_scheduled_run_computes_the_loss_inside(script, tmp_path, monkeypatch):
    targets, wrap = [], script.SplitPipe.forward

    def noted(self, input, target=None):
        targets.append(target is not None)
        return wrap(self, input, target)

    monkeypatch.setattr(script.SplitPipe, "forward", noted)
    assert script.main([*TINY, "--schedule", "zb-h1", "--steps", "3", "--save", str(tmp_path / "a.pt")]) == 0
    assert targets.count(True) == 3


@wrapped_or_not
def test_resumed_run_equals_straight_run(script, tmp_path, mode):
    straight, half, resumed = (tmp_path / name for name in ("straight.pt", "half.pt", "resumed.pt"))
    assert script.main([*TINY, *mode, "--steps", "8", "--save", str(straight)]) == 0
    assert script.main([*TINY, *mode, "--steps", "4", "--save", str(half)]) == 0
    again = ["--steps", "8", "--save", str(resumed), "--resume", str(half)]
    assert script.main([*TINY, *mode, *again]) == 0
    for part in ("model", "optimizer", "step"):
        assert_identical(checkpoint(resumed)[part], checkpoint(straight)[part])
    assert checkpoint(resumed)["step"] == 8


def test_resumed_run_may_change_from_plain_to_wrapped(script, tmp_path):
    half, whole = tmp_path / "half.pt", tmp_path / "whole.pt"
    assert script.main([*TINY, "--unwrapped", "--steps", "2", "--save", str(half)]) == 0
    assert script.main([*TINY, "--steps", "4", "--save", str(whole), "--resume", str(half)]) == 0


def test_dropout_of_resumed_plain_run_equals_straight_run(script, tmp_path):
    options = [*TINY, "--unwrapped", "--dropout", "0.2"]
    straight, half, resumed = (tmp_path / name for name in ("straight.pt", "half.pt", "resumed.pt"))
    assert script.main([*options, "--steps", "4", "--save", str(straight)]) == 0
    assert script.main([*options, "--steps", "2", "--save", str(half)]) == 0
    assert script.main([*options, "--steps", "4", "--save", str(resumed), "--resume", str(half)]) == 0
    assert_identical(checkpoint(resumed)["model"], checkpoint(straight)["model"])


def test_checkpoint_loads_into_plain_module_with_same_loss(script, tmp_path, capsys):
    path = tmp_path / "a.pt"
    assert script.main([*TINY, "--steps", "3", "--save", str(path)]) == 0
    plain = script.gpt(context=16, width=16, heads=2, layers=2, dropout=0.0)
    plain.load_state_dict(checkpoint(path)["model"])
    _, held_out = script.text.load()
    loss = script.evaluate(plain, script.text.windows(held_out, 5, 16), [torch.device("cpu")], False)
    printed = capsys.readouterr().out
    assert f"{loss:.4f}" == f"{losses(printed)[-1]:.4f}"
    assert "the same" in printed.splitlines()[-1]


def test_checkpoint_that_does_not_hold_the_trained_model_is_exit_code_1(
    script, tmp_path, capsys, monkeypatch
):
    write = script.save

    def save_halved(state, path):
        state["model"] = {name: value / 2 for name, value in state["model"].items()}
        write(state, path)

    monkeypatch.setattr(script, "save", save_halved)
    assert script.main([*TINY, "--steps", "3", "--save", str(tmp_path / "a.pt")]) == 1
    assert "NOT THE SAME" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "more",
    [
        ["--checkpoint", "always", "--dropout", "0.1"],
        ["--checkpoint", "never", "--chunks", "7", "--balance", "1", "3"],
        ["--balance", "time"],
        ["--autocast"],
        ["--devices", "cpu"],
        ["--devices", "cpu", "cpu", "cpu", "cpu"],
        ["--schedule", "zb-h1", "--checkpoint", "always", "--dropout", "0.1"],
        ["--schedule", "zb-v", "--chunks", "7", "--balance", "time"],
        ["--schedule", "v-half", "--devices", "cpu", "--autocast"],
        ["--schedule", "v-half", "--unwrapped"],
    ],
    ids=" ".join,
)
def test_option_trains(script, tmp_path, more):
    assert script.main([*TINY, *more, "--steps", "2", "--save", str(tmp_path / "a.pt")]) == 0


def test_help_names_every_option(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    names = "steps batch chunks context width heads layers dropout lr schedule stages devices balance checkpoint"
    for name in f"{names} autocast seed eval-every save resume unwrapped".split():
        assert f"--{name}" in printed


def test_script_runs_from_the_root_of_the_repository():
    command = [sys.executable, "benchmarks/train_gpt.py", "--steps", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train_gpt.py: error: --steps must be 1 or more; found 0\n"


def refusal(script: ModuleType, options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the script says of bad options, which must be one line and exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        script.main(options)
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("train_gpt.py: error: ")
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    return captured.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--steps 0", "--steps must be 1 or more; found 0"),
        ("--steps many", "invalid int value: 'many'"),
        ("--batch 0", "--batch must be"),
        ("--chunks 0", "--chunks must be 1 or more; found 0"),
        ("--context 0", "--context must be"),
        ("--context 400", "--context can be 399 at most"),
        ("--heads 0", "--heads must be"),
        ("--layers -1", "--layers must be 1 or more; found -1"),
        ("--stages 0", "--stages must be"),
        ("--eval-every 0", "--eval-every must be"),
        ("--width 30 --heads 4", "--width must be a multiple of --heads; found 30 and 4"),
        ("--dropout 1", "--dropout must be 0 or more and less than 1; found 1.0"),
        ("--lr nan", "--lr must be more than 0 and finite; found nan"),
        ("--seed -1", "--seed must be 0 or more"),
        ("--balance 3 2", "--balance must sum to the 6 layers"),
        ("--balance 2 2 2 --stages 2", "--balance must name the layers of all 2 stages; found 3 numbers"),
        ("--balance 6 0", "--balance takes layers a stage, as in 3 3, or the word time; found 6 0"),
        ("--balance even", "the word time; found even"),
        ("--stages 7", "7 stages need a layer each; found 6"),
        ("--devices cpu --stages 2", "2 stages need as many --devices"),
        ("--devices cpu warp:9", "no warp:9 here; this machine has cpu"),
        ("--schedule v-half --stages 3", "--schedule v-half puts 2 stages on each device; found 3 stages"),
        ("--schedule v-half --balance 2 2 2", "--schedule v-half puts 2 stages on each device; found 3 stages"),
        ("--schedule v-half --devices cpu --stages 4", "4 stages of --schedule v-half need 2 --devices, the same one"),
        ("--schedule v-half --devices cpu cpu --balance 3 3", "--balance must name the layers of all 4 stages"),
        ("--schedule v-half --layers 1", "4 stages need a layer each; found 3"),
        ("--schedule fastest", "invalid choice: 'fastest'"),
        ("--checkpoint sometimes", "invalid choice: 'sometimes'"),
        ("--fast", "unrecognized arguments: --fast"),
        ("--save no/such/directory/a.pt", "--save needs a file in a directory that can be written to"),
        ("--resume no-such-file.pt", "--resume no-such-file.pt: no such file"),
    ],
)
def test_bad_option_is_one_line(script, capsys, options, said):
    assert said in refusal(script, options.split(), capsys)


def test_all_faults_are_said_together(script, capsys):
    said = refusal(script, ["--lr", "0", "--chunks", "0", "--save", str(ROOT), "--resume", "none.pt"], capsys)
    for name in ("--lr", "--chunks", "--save", "--resume"):
        assert name in said


@pytest.fixture
def trained(script, tmp_path, capsys) -> Path:
    """A checkpoint of two steps."""
    path = tmp_path / "trained.pt"
    assert script.main([*TINY, "--unwrapped", "--steps", "2", "--save", str(path)]) == 0
    capsys.readouterr()
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--width 32", "was trained with --width 16; found --width 32"),
        ("--layers 3 --heads 4", "was trained with --heads 2 --layers 2; found --heads 4 --layers 3"),
        ("--steps 2", "has done 2 steps, so --steps must be more; found 2"),
    ],
)
def test_resume_file_of_another_run_is_one_line(script, trained, capsys, more, said):
    assert said in refusal(script, [*TINY, "--resume", str(trained), *more.split()], capsys)


def drop_a_parameter(found):
    del found["model"]["0.position"]


def drop_a_moment(found):
    del found["optimizer"]["state"][0]


def drop_the_step(found):
    del found["step"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (drop_a_parameter, "does not hold the parameters of this model"),
        (drop_a_moment, "does not hold the state of this optimizer"),
        (drop_the_step, "is no checkpoint of this script (KeyError: 'step')"),
    ],
)
def test_resume_file_that_misses_something_is_one_line(script, trained, capsys, harm, said):
    found = checkpoint(trained)
    harm(found)
    torch.save(found, trained)
    assert said in refusal(script, [*TINY, "--resume", str(trained)], capsys)


@pytest.mark.parametrize("keep", [0, 10, 4000])
def test_resume_file_that_is_cut_off_is_one_line(script, trained, capsys, keep):
    trained.write_bytes(trained.read_bytes()[:keep])
    assert "is no checkpoint of this script" in refusal(script, [*TINY, "--resume", str(trained)], capsys)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_interrupt_before_a_checkpoint_saves_nothing(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "clip_grad_norm_", interrupt)
    assert script.main([*TINY, "--steps", "3", "--save", str(tmp_path / "a.pt")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "train_gpt.py: interrupted; nothing was saved"
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_writing_keeps_the_checkpoint_before(script, tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.pt"
    write, saves = torch.save, []

    def write_one_then_half(state, file):
        saves.append(state["step"])
        if len(saves) > 1:
            file.write(b"half")
            raise KeyboardInterrupt
        write(state, file)

    monkeypatch.setattr(torch, "save", write_one_then_half)
    assert script.main([*TINY, "--steps", "4", "--eval-every", "2", "--save", str(path)]) == 130
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == f"train_gpt.py: interrupted; continue with --resume {path}"
    )
    assert saves == [2, 4]
    assert list(tmp_path.iterdir()) == [path]
    assert checkpoint(path)["step"] == 2


@pytest.mark.parametrize(
    ("options", "names", "balance"),
    [
        ("", ["fast:0", "fast:1", "fast:2"], [2, 2, 2]),
        ("--stages 2", ["fast:0", "fast:1"], [3, 3]),
        ("--balance 2 4", ["fast:0", "fast:1"], [2, 4]),
        ("--devices fast:2 cpu", ["fast:2", "cpu"], [3, 3]),
        ("--balance time", ["fast:0", "fast:1", "fast:2"], None),
        ("--layers 5", ["fast:0", "fast:1", "fast:2"], [2, 2, 3]),
        ("--schedule 1f1b", ["fast:0", "fast:1", "fast:2"], [2, 2, 2]),
        ("--schedule v-half", ["fast:0", "fast:1", "fast:2"], [1, 1, 1, 1, 1, 1]),
        ("--schedule v-half --stages 4", ["fast:0", "fast:1"], [1, 2, 1, 2]),
        ("--schedule v-half --balance 1 2 2 1", ["fast:0", "fast:1"], [1, 2, 2, 1]),
    ],
)
def test_stages_go_to_all_accelerators(script, monkeypatch, options, names, balance):
    class Fast:
        type = "fast"

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: Fast)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert script.place(script.parser().parse_args(options.split())) == (names, balance, [])
    *_, faults = script.place(script.parser().parse_args(["--stages", "4"]))
    assert faults == [
        "4 stages need as many --devices, the same one twice if need be; found 3 (fast:0 fast:1 fast:2)"
    ]


def test_model_sees_nothing_of_what_follows(script):
    model = script.gpt(context=8, width=16, heads=4, layers=2, dropout=0.0)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 200
    same = (model(tokens) == model(changed)).all(dim=2)[0].tolist()
    assert same == [True] * 5 + [False] * 3


def test_model_refuses_a_width_that_heads_do_not_divide(script):
    with pytest.raises(ValueError, match="found width 10 and 4 heads"):
        script.gpt(context=8, width=10, heads=4, layers=1, dropout=0.0)


def test_windows_cover_the_text_once_in_order(script):
    data = torch.arange(50)
    pairs = script.text.windows(data, 2, 7)
    inputs, targets = (torch.cat(parts).flatten() for parts in zip(*pairs, strict=True))
    assert torch.equal(inputs, data[:49])
    assert torch.equal(targets, data[1:])


def test_batch_is_windows_of_the_text_and_the_bytes_that_follow(script):
    inputs, targets = script.text.batch(torch.arange(50), 6, 7)
    assert inputs.shape == targets.shape == (6, 7)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(7).expand(6, 7))
    assert torch.equal(targets, inputs + 1)
