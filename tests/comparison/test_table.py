from rich.console import Console
from rich.table import Table

from eagle3.comparison.results import Results
from eagle3.comparison.table import live_table, results_table, stages_table


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


def test_a_live_pass_shows_speed_and_what_it_amounts_to_in_words(live_results: Results) -> None:
    text = rendered(live_table(live_results))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    plain, ours = next(line for line in lines if line[0] == "no"), next(line for line in lines if line[:2] == ["ours", "3"])
    assert plain[2:4] == ["1", "50.0"] and ours[2] == "1" and ours[-1] == "100%"
    assert "ours (k=3, 1 in flight): faster than no speculation on 8 prompts" in text
    assert "best k for 1 in flight: 3, expected speed-up" in text and ", measured 1.60" in text


def test_published_figures_never_stand_among_the_measured(live_results: Results) -> None:
    assert "published for theirs, on other prompts and not measured here: GSM8K 3.165 (a model card)" in " ".join(rendered(results_table(live_results)).split())
    assert not {"theirs"} & ({arm["arm"] for arm in live_results["arms"]} | {line["arm"] for line in live_results["live"]})


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


def test_synthetic_prompts_are_labelled_once(results: Results) -> None:
    """tokenspeed#1305: random prompts inflate acceptance."""
    for arm in results["arms"]:
        arm["notes"] = ["the prompts are synthetic"]
    assert rendered(results_table(results)).count("note: the prompts are synthetic") == 1
