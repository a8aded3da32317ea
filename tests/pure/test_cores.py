"""The cores that a process may use."""

import pytest

from autopipe import cores


@pytest.mark.parametrize(
    ("groups", "files", "quotas"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n", "a/cpu.max": "max 100000\n"}, [1.5]),
        ("0::/a\n", {"cpu.max": "400000 100000\n"}, [4.0]),
        ("0::/a\n", {}, []),
        ("1:cpu,cpuacct:/x\n0::/\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, [3.0]),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, []),
    ],
)
def test_the_quota_of_a_control_group_limits_the_cores(groups, files, quotas, tmp_path, monkeypatch):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert list(cores._quotas(tmp_path / "fs", tmp_path / "groups")) == quotas
    monkeypatch.setattr(cores, "_quotas", lambda: iter(quotas))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert cores.usable_cores() == max(1, int(min([8, *quotas])))
