"""benchmarks/judge_load.py against small HTTP judges with a known delay."""

import json

import pytest
from fakes import fake_judge

import judge_load

FakeJudge = fake_judge.FakeJudge


@pytest.fixture
def measure(tmp_path):
    """Exit status and report of judge_load.py for servers by name."""

    def run(servers, *arguments):
        targets = [
            part
            for name, server in servers.items()
            for part in ("--target", f"{name}={server.url}")
        ]
        output = tmp_path / "judge_load.json"
        status = judge_load.main(
            [*targets, "--model", "paco-reward-7b", *arguments, "--output", str(output)]
        )
        return status, json.loads(output.read_text()) if output.exists() else None

    return run


def test_the_slower_of_two_servers_is_found(measure):
    with FakeJudge(delay_s=0.03) as fast, FakeJudge(delay_s=0.12) as slow:
        slow.url += "/v1"
        arguments = ["--concurrency", "1", "4", "--pairs", "6", "--rounds", "3"]
        status, report = measure({"fast": fast, "slow": slow}, *arguments)
        assert status == 0 and slow.max_in_flight == 4
        assert len(fast.requests) == len(slow.requests) == 1 + 4 + 3 * (6 + 6)
        asked = [json.dumps(request["messages"]) for request in fast.requests]
        assert len(set(asked)) == len(asked)  # new pictures in every round
    fast, slow = (row for row in report["targets"] if row["concurrency"] == 4)  # sorted by name
    assert (
        slow["pairs_per_second"] < 0.8 * fast["pairs_per_second"]
        and slow["p50_ms"] > fast["p50_ms"] + 15
    )
    assert len(report["rounds"]) == 2 * 2 * 3


def test_errors_are_counted_and_have_no_latency(measure):
    def every_second(number, request):
        return (400, {"error": {"message": "no"}}, {}) if number % 2 else (200, b"{}", {})

    with FakeJudge(every_second) as some, FakeJudge(lambda number, request: (400, {}, {})) as none:
        arguments = ["--pairs", "8", "--rounds", "1", "--concurrency", "1"]
        status, report = measure({"some": some, "none": none}, *arguments)
        assert status == 0
        assert measure({"none": none}, *arguments)[0] == 2  # no request is answered
    some, none = (
        report["rounds"] if report["rounds"][0]["target"] == "some" else reversed(report["rounds"])
    )
    assert some["errors"] == len(some["latencies_ms"]) == 4 and "HTTP 400" in some["first_error"]
    assert none["errors"] == 8 and report["targets"][0]["p50_ms"] is None


def test_two_settings_of_one_server_are_compared(measure, tmp_path, capsys):
    common = ["--concurrency", "1", "--pairs", "4", "--rounds", "1"]
    with FakeJudge() as server:
        assert measure({"1-api-server": server}, *common)[0] == 0
        one = (tmp_path / "judge_load.json").rename(tmp_path / "one.json")
        status, report = measure({"4-api-servers": server}, *common, "--against", str(one))
        assert status == 0
        assert [row["target"] for row in report["targets"]] == ["1-api-server", "4-api-servers"]
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[-2:]] == ["1-api-server", "4-api-servers"]
        assert measure({"1-api-server": server}, *common, "--against", str(one))[0] == 2
        other = ["--against", str(one), "--size", "128", *common]
        assert measure({"4-api-servers": server}, *other)[0] == 2
        assert "measured with --size 64, not 128" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(measure, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with FakeJudge() as server:
        arguments = ["--concurrency", "1", "--pairs", "1", "--rounds", "1"]
        status, report = measure({"server": server}, *arguments)
    assert status == 0 and "secret" not in json.dumps(report)
    assert all(headers.get("authorization") == "Bearer secret" for headers in server.headers)
