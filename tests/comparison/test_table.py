from rich.console import Console
from rich.table import Table

from eagle3.comparison.results import Results
from eagle3.comparison.table import results_table, stages_table


def rendered(table: Table, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_each_arm_and_k_is_a_line_and_the_k_asked_for_is_marked(results: Results) -> None:
    text = rendered(results_table(results))
    lines = [" ".join(line.split()[:3]) for line in text.split("─ \n")[1].splitlines()[:6]]
    assert lines == ["ours 1 0", "ours → 3", "ours 5 0", "baseline → 3", "ngram → 3", "ours (live) →"]


def test_the_line_shows_the_interval_and_every_position(results: Results) -> None:
    arm = results["arms"][1]
    low, high = arm["interval"]
    text = rendered(results_table(results))
    assert f"{arm['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]" in text
    assert " ".join(f"{100 * share:.0f}" for share in arm["acceptance_at"]) in text


def test_a_narrow_terminal_still_shows_every_number(results: Results) -> None:
    words = [rendered(results_table(results), width).replace("─", "").split() for width in (85, 200)]
    assert sorted(words[0]) == sorted(words[1])


def test_verdicts_stand_below_the_table(results: Results) -> None:
    text = rendered(results_table(results))
    assert "ours - ngram (replay, k=3, T=0)" in text
    assert "better on 30 prompts" in text
    assert "98.1%" in text


def test_speed_is_shown_for_servers_only(results: Results) -> None:
    assert "tok/s" in rendered(results_table(results))
    results["arms"] = [arm for arm in results["arms"] if arm["source"] == "replay"]
    assert "tok/s" not in rendered(results_table(results))


def test_an_arm_without_an_interval_shows_its_estimate_alone(results: Results) -> None:
    with_interval = rendered(results_table(results))
    results["arms"][1]["interval"] = (None, None)
    without = rendered(results_table(results))
    assert without.count(" [") == with_interval.count(" [") - 1
    assert "None" not in without


def test_stages_say_what_was_made_and_what_it_cost(results: Results) -> None:
    text = rendered(stages_table(results))
    assert "generate (train)" in text
    assert "cached" in text
    assert "5.3 MB" in text
    assert "0123456789ab" in text
    assert "0123456789abc" not in text
