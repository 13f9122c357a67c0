"""A checkpoint that this run cannot continue is refused by its run.json, before any work."""

import shutil

import pytest

from models.arch import ARCHITECTURES
from models.folders import read_json
from ulysses.check.preflight import prepare
from ulysses.check.run_folder import FORMAT, write_run_state
from ulysses.config.command_line import parse_command_line
from ulysses.config.section import ConfigError
from ulysses.data.cache import digest_of_value
from ulysses.disk import digest_of, write_json
from ulysses.options import build_policies


def config(output, changes=""):
    """A run by shape alone; tokenizer and data are absent."""
    line = f"""--stage dpo --model.arch llama3-8b --model.init random --run.steps 4
        --run.output {output} --run.resume auto {changes}"""
    return parse_command_line(line.split()).config


@pytest.fixture
def checkpoint(tmp_path):
    """What a run of DPO wrote, without its weights."""
    folder = tmp_path / "checkpoints/step-2"
    folder.mkdir(parents=True)
    own = config(tmp_path)
    state = {
        "step": 2,
        "files": {"rank-00000.json": digest_of(write(folder / "rank-00000.json"))},
        "config": own.model_dump(mode="json"),
        "shape": ARCHITECTURES["llama3-8b"].to_hf(),
        "policies": build_policies(own.gradients).state_dict(),
        "inputs": {},
    }
    write_run_state(folder, state)
    return folder


def write(path, text="{}"):
    path.write_text(text)
    return path


def test_its_own_checkpoint_is_found(checkpoint, tmp_path):
    own = config(tmp_path, "--optimizer.lr 1 --parallel.sequence_parallel_size 4")
    assert prepare(own, 4, []).resume_from == checkpoint
    assert prepare(config(tmp_path / "elsewhere"), 1, []).resume_from is None


def test_a_run_that_went_back_and_is_restarted_continues_what_it_has_written_since(
    checkpoint, tmp_path, monkeypatch
):
    """Which it is allowed to by torchrun's --max-restarts; what another start has written is still in the way."""
    newer = tmp_path / "new/checkpoints/step-2"
    shutil.copytree(checkpoint, newer)
    back, path = config(tmp_path / "new", f"--run.resume {checkpoint}"), newer / "run.json"
    for may_restart in (False, True):
        if may_restart:
            monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
        with pytest.raises(ConfigError, match="new already holds checkpoints"):
            prepare(back, 1, [])
    write_json(path, forged("config", back.model_dump(mode="json"))(read_json(path)))
    assert prepare(back, 1, []).resume_from == newer


REFUSED = {
    "--stage sft":
        r"run.resume: the run that wrote .*step-2 had stage 'dpo' but this run has 'sft'; set the same, or another",
    "--model.arch llama3.2-1b": "had hidden_size 4096 but this run has 2048",
    "--model.rope.type yarn --model.rope.factor 2": "had rope_scaling None but this run has {'rope_type'",
    "--model.rope.theta 1e6": "had rope_theta 500000.0 but this run has 1000000.0",
    "--model.lora.rank 8": "had model.lora.rank 0 but this run has 8",
    '--gradients.policies [{"policy":"skip_spike"}]': r"policies are .*'clip_global_norm'\] but this run has",
}  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED)
def test_another_runs_checkpoint_is_refused(changes, checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=REFUSED[changes]) as caught:
        prepare(config(tmp_path, changes), 1, [])
    assert str(caught.value).startswith("run.resume: ")


ADAPTED = {
    "--model.lora.rank 4": "had model.lora.rank 8 but this run has 4",
    "--model.lora.alpha 32": "had model.lora.alpha 16.0 but this run has 32.0; set the same",
    "--model.lora.rslora true": "had model.lora.rslora False but this run has True; set the same",
    '--model.lora.targets ["q_proj"]': "had model.lora.targets .* but this run has",
    "--model.lora.dropout 0.1": "",
    "--model.lora.merge true": "",
}


@pytest.mark.parametrize("changes", ADAPTED)
def test_adapters_mean_what_they_meant_when_they_were_saved(changes, checkpoint, tmp_path):
    """Another scale would be another model in the next step; dropout and merging change none."""
    lora, path = "--model.lora.rank 8", checkpoint / "run.json"
    own = config(tmp_path, lora).model_dump(mode="json")
    write_json(path, forged("config", own)(read_json(path)))
    if ADAPTED[changes]:
        with pytest.raises(ConfigError, match=ADAPTED[changes]):
            prepare(config(tmp_path, f"{lora} {changes}"), 1, [])
    else:
        assert prepare(config(tmp_path, f"{lora} {changes}"), 1, []).resume_from == checkpoint


@pytest.mark.parametrize(
    "changes", ["--ppo.minibatches 2", "--ppo.epochs 3", "--ppo.advantage reinforce++"]
)
def test_the_steps_of_a_rollout_stay_what_they_were(changes, checkpoint, tmp_path):
    """With others the same step would belong to another rollout, and prompts would come again, or never."""
    typed, path = '--stage ppo --ppo.reward ["math:fsum"]', checkpoint / "run.json"
    own = config(tmp_path, typed).model_dump(mode="json")
    write_json(path, forged("config", own)(read_json(path)))
    assert prepare(config(tmp_path, f"{typed} --ppo.clip 0.3"), 1, []).resume_from == checkpoint
    with pytest.raises(ConfigError, match="had ppo.[a-z]+ .* but this run has"):
        prepare(config(tmp_path, f"{typed} {changes}"), 1, [])
    insisting = config(tmp_path, f"{typed} {changes} --run.resume_anyway true")
    assert prepare(insisting, 1, []).resume_from == checkpoint


@pytest.mark.parametrize("epochs", [2, 3])
@pytest.mark.parametrize(
    "changes",
    ["--ppo.temperature 2", "--ppo.importance_cap 2", "--ppo.loss_aggregation sequence", "--ppo.kl_coefficient 0"],
)  # fmt: skip
def test_the_rest_of_a_rollout_is_trained_as_it_was_made(changes, epochs, checkpoint, tmp_path):
    """The second step ends the rollout, or is in its middle; the next one is made with what is set then."""
    typed = f'--stage ppo --ppo.reward ["math:fsum"] --ppo.epochs {epochs}'
    path = checkpoint / "run.json"
    own = config(tmp_path, typed).model_dump(mode="json")
    write_json(path, forged("config", own)(read_json(path)))
    changed = config(tmp_path, f"{typed} {changes} --run.resume_anyway true")
    if epochs == 2:
        assert prepare(changed, 1, []).resume_from == checkpoint
        return
    with pytest.raises(ConfigError, match="or continue a checkpoint between two rollouts"):
        prepare(changed, 1, [])


def change(**values):
    """Change run.json so; a value of None takes the key out."""

    def edited(state):
        return {k: v for k, v in (state | values).items() if v is not None}

    return edited


def forged(key, value):
    """Change run.json so, and sign it as a run does."""

    def edited(state):
        state = change(**{key: value}, digest=None)(state)
        return state | {"digest": digest_of_value(state)}

    return edited


def test_targets_of_adapters_that_neither_run_has_may_differ(checkpoint, tmp_path):
    path = checkpoint / "run.json"
    state = read_json(path)
    state["config"]["model"]["lora"]["targets"] += ["in_proj_qkv"]
    write_json(path, forged("config", state["config"])(state))
    assert prepare(config(tmp_path), 1, []).resume_from == checkpoint


# What run.json becomes.
CHANGED = {
    "another step": change(step=4),
    "no files": change(files={}),
    "files of another kind": change(files=5),
    "other settings": change(best=[1, 0.5]),
    "no digest": change(digest=None),
    "an older format": change(format=1),
    "no step, and a digest of that": forged("step", None),
    "no digests of inputs": forged("inputs", None),
}
OLDER = "has checkpoint format 1, but this version reads format 6; continue it with the version"
NONE = {"a list": [], "pairs": [["format", FORMAT]], "a number": 5, "nothing": {}}


@pytest.mark.parametrize("what", [*CHANGED, *NONE])
def test_what_run_json_says_is_covered_by_its_digest(what, checkpoint, tmp_path):
    path, sentence = checkpoint / "run.json", "run.json does not hold what was written there"
    if what in NONE:
        sentence = "step-2 is not a complete checkpoint; give a folder"
    if what == "an older format":
        sentence = OLDER
    state = read_json(path)
    write_json(path, CHANGED[what](state) if what in CHANGED else NONE[what])
    for resume in ("auto", str(checkpoint), f"{checkpoint}/"):
        with pytest.raises(ConfigError, match=sentence):
            prepare(config(tmp_path, f"--run.resume {resume}"), 1, [])


def test_what_was_put_beside_its_files_or_stands_under_another_name_is_refused(
    checkpoint, tmp_path
):
    write(checkpoint / "rank-00001.json")
    with pytest.raises(ConfigError, match="run.json does not name rank-00001.json among"):
        prepare(config(tmp_path), 1, [])
    (checkpoint / "rank-00001.json").unlink()
    moved = checkpoint.rename(checkpoint.with_name("step-7"))
    with pytest.raises(ConfigError, match="step-7/run.json is of step 2, and not of the one"):
        prepare(config(tmp_path), 1, [])
    best = moved.rename(tmp_path / "best")
    assert prepare(config(tmp_path, f"--run.resume {best}"), 4, []).resume_from == best
