"""`raysearch pretrain`: makes the network and the policy of the searcher `prior`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raysearch.base.errors import Interrupted
from raysearch.cli.commands.options import OUT_HELP, JsonOption, at_home, print_json
from raysearch.cli.commands.settings import Setting, takes_settings
from raysearch.processes.watcher import can_go_on_with


@takes_settings
def pretrain(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="Name in configs/pretraining, or the path of a TOML file.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help=OUT_HELP, callback=at_home)] = Path("results/prior"),
    processes: Annotated[int, Setting("Processes that evaluate workloads.", least=1, most=1024)] = 1,
    as_json: JsonOption = False,
) -> None:
    """Train what the searcher `prior` starts from, on random workloads solved by the simulator.

    First a network that predicts what a strategy does. Then, if the file has a table `policy`, the policy that chooses
    the calls: from the true regret of candidates, and by PPO on whole searches.

    It begins by printing what it will make and about how long that takes: `default` ships, and takes some 20 minutes of
    a core. Ctrl-C loses only the last few seconds: the same command continues. The folder has a TensorBoard log.

    \b
    Examples:
      raysearch pretrain default
      raysearch pretrain mine.toml --out results/mine --set processes=16
      raysearch search -w gpt_moe_1_2t_16k -s prior
    """
    from raysearch.base.progress import stepping
    from raysearch.pretraining.pretrained import POLICY_FILE, PRIOR_FILE, pretrain_policy
    from raysearch.pretraining.pretrained import pretrain as make
    from raysearch.pretraining.pretraining_file import PretrainingFile
    from sim.config.files import config_path, read_config

    asked = read_config(config_path("pretraining", path), PretrainingFile)
    print(f"pre-training by {config_path('pretraining', path)}, into {out}: {asked.work}", file=sys.stderr)
    can_go_on_with(sys.argv[1:])
    try:
        header = make(path, out, processes, stepping)
        policy = pretrain_policy(path, out, processes, stepping)
    except Interrupted as stop:
        kept = f"what is finished is kept in {out}: the same command continues"
        raise Interrupted(stop.signum, f"{stop}; {kept}") from None
    if as_json:
        beside = {"policy_file": str(out / POLICY_FILE), "policy_figures": policy.figures} if policy else {}
        print_json({"file": str(out / PRIOR_FILE), "figures": header.figures, **beside})
        return
    found = header.figures
    print(f"{found['strategies']:,.0f} strategies of {found['workloads']:,.0f} workloads, one in twenty held out")
    print(
        f"held out, near the best: error of the time {found['median_error_step']:.1%} (median) and "
        f"{found['p90_error_step']:.1%} (p90), of the memory {found['median_error_memory']:.1%}"
    )
    print(f"wrote {out / PRIOR_FILE}")
    if policy:
        print(f"f/f* on {policy.figures['kept tables']:.0f} held-out black boxes after so many calls:")
        for name in ("expected improvement", policy.chosen):
            curve = [(key, value) for key, value in policy.figures.items() if key.startswith(f"{name}, call ")]
            print(f"  {name}: " + ", ".join(f"{key.rpartition(' ')[2]}: {value:.3f}" for key, value in curve))
        print(f"wrote {out / POLICY_FILE}")
