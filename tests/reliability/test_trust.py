"""Files of others: what is malicious in them runs no code, allocates nothing of its size, and is refused in one sentence."""

import json
import os
import pickle
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import random_episodes
from safetensors.torch import load_file, save_file

from tap.data.catalog import DatasetInfo
from tap.data.episodes import Episodes, save_episodes
from tap.data.hdf5 import open_table
from tap.model.critic import Critic, save_critic
from tap.model.prior import Prior
from tap.model.vqvae import VQVAE
from tap.planning.policy import Policy
from tap.results import Lineage
from tap.settings import read_params_file

MEMORY = 4 << 30  # bytes that a test may allocate


class Exploit:
    """What leaves a file behind where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.witness),)


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """A folder that exists once an Exploit has run."""
    return tmp_path / "witness"


def test_the_exploit_works_where_pickles_are_loaded(witness: Path) -> None:
    pickle.loads(pickle.dumps(Exploit(witness)))
    assert witness.exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test saves a policy with a critic."""
    return tmp_path_factory.mktemp("saved") / "policy"


@pytest.fixture
def policy_folder(saved: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A test's own copy of a policy with a critic."""
    if not saved.exists():
        policy, params = request.getfixturevalue("tiny_policy"), request.getfixturevalue("tiny_params")
        policy.save(saved)
        critic = Critic(params.train_critic, policy.vqvae).eval()
        critic.held_out_error = 2.0
        save_critic(saved, critic)
        change(saved / "planner.json", ["search"], "critic_weighted")
        Policy.load(saved)
    shutil.copytree(saved, tmp_path / "policy")
    return tmp_path / "policy"


def change(file: Path, path: list[str], value: Any) -> None:
    """Replace one value in a JSON file."""
    tree = json.loads(file.read_text())
    section = tree
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    file.write_text(json.dumps(tree))


def assert_refused(folder: Path, match: str) -> None:
    """A policy is refused in one sentence that names its file, with little memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    try:
        with pytest.raises(ValueError, match=match) as caught:
            Policy.load(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    sentence = str(caught.value)
    assert str(folder) in sentence and "\n" not in sentence and len(sentence) < 600, sentence


FILES = [f"{name}.{kind}" for name in ("vqvae", "prior", "critic", "planner") for kind in ("json", "safetensors")][:-1]


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_the_place_of_any_file_is_not_loaded(policy_folder: Path, name: str, witness: Path) -> None:
    for content in (pickle.dumps(Exploit(witness)), pickle.dumps(Exploit(witness), protocol=0)):
        (policy_folder / name).write_bytes(content)
        assert_refused(policy_folder, name.replace(".", r"\."))
    torch.save({"weights": Exploit(witness)}, policy_folder / name)
    assert_refused(policy_folder, name.replace(".", r"\."))
    assert not witness.exists()


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_not_read(policy_folder: Path, name: str) -> None:
    """A named pipe or a device would never end."""
    file = policy_folder / name
    file.unlink()
    os.mkfifo(file)
    assert_refused(policy_folder, name.replace(".", r"\."))
    file.unlink()
    file.symlink_to("/dev/zero")
    assert_refused(policy_folder, name.replace(".", r"\."))


def test_a_link_to_a_secret_reveals_nothing_of_it(policy_folder: Path, tmp_path: Path) -> None:
    for content in ("password: hunter2", '{"password": "hunter2"}', '"hunter2"'):
        (tmp_path / "secret").write_text(content)
        for name in FILES:
            shutil.copytree(policy_folder, tmp_path / "linked", dirs_exist_ok=True)
            (tmp_path / "linked" / name).unlink()
            (tmp_path / "linked" / name).symlink_to(tmp_path / "secret")
            with pytest.raises(ValueError) as caught:
                Policy.load(tmp_path / "linked")
            assert "hunter2" not in str(caught.value)
            (tmp_path / "linked" / name).unlink()


HUGE = 10**9  # squared, four exabytes
WRONG: list[tuple[str, list[str], Any]] = [
    ("vqvae", ["params", "transformer", "width"], HUGE),
    ("vqvae", ["params", "transformer", "width"], 10**30),
    ("vqvae", ["params", "transformer", "layers"], HUGE),
    ("vqvae", ["params", "transformer", "layers"], -1),
    ("vqvae", ["params", "transformer", "heads"], 0),
    ("vqvae", ["params", "codebook", "size"], HUGE),
    ("vqvae", ["params", "codebook", "dim"], 10**18),
    ("vqvae", ["params", "windows", "length"], 3 * HUGE),
    ("vqvae", ["params", "windows"], "../../etc/passwd"),
    ("vqvae", ["params"], []),
    ("vqvae", ["layout"], [11, 3]),
    ("vqvae", ["layout", "observation_dim"], -11),
    ("vqvae", ["layout", "observation_dim"], "11; rm"),
    ("vqvae", ["layout", "observation_dim"], HUGE),
    ("vqvae", ["layout", "action_dim"], 1e300),
    ("vqvae", ["normalizer"], None),
    ("vqvae", ["normalizer", "mean"], [0.0] * 17),
    ("vqvae", ["normalizer", "mean"], "0" * 16),
    ("vqvae", ["normalizer", "std"], [0.0] * 16),
    ("vqvae", ["normalizer", "std"], [float("nan")] * 16),
    ("vqvae", ["normalizer", "max"], [1e300] * 16),
    ("vqvae", ["normalizer", "max"], None),
    ("vqvae", ["loader"], "os.system"),
    ("prior", ["params", "transformer", "width"], HUGE),
    ("prior", ["params", "transformer", "layers"], HUGE),
    ("prior", ["params", "transformer", "layers"], 3),
    ("prior", ["params"], None),
    ("critic", ["params", "members"], HUGE),
    ("critic", ["params", "width"], 10**12),
    ("critic", ["held_out_error"], float("nan")),
    ("critic", ["held_out_error"], "2.0; rm"),
    ("critic", ["held_out_error"], -1),
    ("planner", ["search"], "__import__('os')"),
    ("planner", ["horizon"], 1.5),
    ("planner", ["path"], "/etc/passwd"),
]


@pytest.mark.parametrize(("name", "path", "value"), WRONG, ids=lambda each: str(each)[:40])
def test_a_wrong_value_in_a_description_is_refused(policy_folder: Path, name: str, path: list[str], value: Any) -> None:
    change(policy_folder / f"{name}.json", path, value)
    assert_refused(policy_folder, rf"{name}\.(json|safetensors)")


CONTENTS = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"1e999",
    "deep": b'{"params":' * 100_000,
    "deep lists": b"[" * 1_000_000,
    "a long number": b'{"params": ' + b"9" * 100_000 + b"}",
    "another encoding": b"\xff\xfe{\x00}\x00",
    "a bomb": b'{"params": [' + b"0," * (9 << 20) + b"0]}",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", ["vqvae", "planner"])
def test_other_content_of_a_description_is_refused(policy_folder: Path, name: str, content: bytes) -> None:
    (policy_folder / f"{name}.json").write_bytes(content)
    assert_refused(policy_folder, rf"{name}\.json")


def header(entries: dict[str, Any], length: int | None = None) -> bytes:
    """A safetensors file without data."""
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


HEADERS = {
    "longer than the file": header({}, 10**12),
    "of 2^64 bytes": header({}, 2**64 - 1),
    "without data": header({"w": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 4 * HUGE**2]}}),
    "with data elsewhere": header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
    "empty": header({}),
    "empty tensors": header({"w" * 10_000: {"dtype": "F32", "shape": [0, HUGE], "data_offsets": [0, 0]}}),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_a_wrong_header_of_weights_is_refused(policy_folder: Path, content: bytes) -> None:
    (policy_folder / "vqvae.safetensors").write_bytes(content)
    assert_refused(policy_folder, r"vqvae\.safetensors does not contain the weights of this model")


def test_weights_of_another_shape_are_refused_and_named(policy_folder: Path) -> None:
    file = policy_folder / "prior.safetensors"
    weights = load_file(file)
    save_file(weights | {"to_logits.bias": torch.zeros(9)}, file)
    assert_refused(policy_folder, r"to_logits\.bias is of size \[9\] in the file, and of size \[8\] in the description")
    save_file(weights | {"../../escape": torch.zeros(1)}, file)
    assert_refused(policy_folder, r"escape is of size \[1\] in the file, and missing in the description")


def test_the_check_of_sizes_draws_no_random_numbers(policy_folder: Path) -> None:
    """A load draws the initial weights that it replaces, and no more: what follows it stays the same to the bit."""
    torch.manual_seed(3)
    policy = Policy.load(policy_folder)
    after = torch.get_rng_state()
    assert policy.critic is not None
    torch.manual_seed(3)
    VQVAE(policy.vqvae.params, policy.vqvae.layout)
    Prior(policy.prior.params, policy.vqvae.params, 11)
    Critic(policy.critic.params, policy.vqvae)
    assert torch.equal(after, torch.get_rng_state())


# Datasets.


@pytest.fixture
def episodes_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "raw/some/episodes"
    episodes = random_episodes([5, 7], 3, 2)
    save_episodes(folder, [episodes], episodes.lengths)
    Episodes.load(folder)
    return folder


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


ARRAYS = {
    "code": npy("{'descr': __import__('os').mkdir('witness'), 'fortran_order': False, 'shape': (12,)}\n"),
    "deep": npy("(" * 9_000),
    "huge": npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({HUGE}, {HUGE})}}\n"),
    "negative": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-12,)}\n"),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (12,)}\n"),
}


@pytest.mark.parametrize("content", ARRAYS.values(), ids=ARRAYS)
def test_a_wrong_array_is_refused(episodes_folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(episodes_folder.parent)
    (episodes_folder / "rewards.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"rewards\.npy .*fetch the dataset again") as caught:
        Episodes.load(episodes_folder)
    assert "\n" not in str(caught.value) and not Path("witness").exists()


def test_a_pickle_in_an_array_is_not_loaded(episodes_folder: Path, witness: Path) -> None:
    np.save(episodes_folder / "rewards.npy", np.array([Exploit(witness)] * 12, dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"rewards\.npy .*fetch the dataset again"):
        Episodes.load(episodes_folder)
    (episodes_folder / "rewards.npy").write_bytes(pickle.dumps(Exploit(witness)))
    with pytest.raises(ValueError, match=r"rewards\.npy .*fetch the dataset again"):
        Episodes.load(episodes_folder)
    assert not witness.exists()


@pytest.mark.parametrize("kind", ["objects", "opaque", "external", "climbing link"])
def test_columns_that_are_no_numbers_in_the_file_are_refused(tmp_path: Path, kind: str, witness: Path) -> None:
    info = DatasetInfo("some", "custom", "file", None, None, None, 100, None, None)
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        for name, shape in (("observations", (12, 3)), ("actions", (12, 2)), ("rewards", (12,)), ("terminals", (12,))):
            file[name] = np.zeros(shape)
        del file["rewards"]
        match kind:
            case "objects":
                file["rewards"] = [pickle.dumps(Exploit(witness), protocol=0).decode()] * 12
            case "opaque":
                file["rewards"] = np.frombuffer(pickle.dumps(Exploit(witness))[:24] * 12, "V24")
            case "external":  # would read any file as numbers
                file.create_dataset("rewards", (12,), "u1", external=[("/etc/passwd", 0, 12)])
            case "climbing link":
                file["rewards"] = h5py.ExternalLink("../../../../../../etc/passwd", "/rewards")
    with pytest.raises(ValueError, match=r"data\.hdf5.*rewards") as caught, open_table(tmp_path / "data.hdf5", info) as table:
        table.read("rewards", slice(0, 12))
    assert "\n" not in str(caught.value) and not witness.exists()


# Results and params.


@pytest.mark.parametrize("content", [*CONTENTS.values(), b'{"run_id": NaN}', b'{"run_id": ["../.."]}'])
def test_wrong_results_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lineage.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"lineage\.json is not valid .*(run its stage again|--force)"):
        Lineage.read(tmp_path / "lineage.json")


YAML = {
    "code": "scale: !!python/object/apply:os.mkdir [witness]\n",
    "a module": "scale: !!python/name:os.system\n",
    "an object": "!!python/object/new:os.mkdir [witness]\n",
    "deep": "scale: " + "[" * 5000 + "]" * 5000 + "\n",
    "binary": "scale: \x00\x01\n",
}


@pytest.mark.parametrize("content", YAML.values(), ids=YAML)
def test_params_are_values_and_run_no_code(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"params\.yaml(, line 1)? is not valid"):
        read_params_file(Path("params.yaml"))
    assert not Path("witness").exists()
