"""A strategy in the words of what runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.base.file_io import strategy_dict, write_together
from raysearch.base.priced_heading import priced_dict, priced_text
from raysearch.deploy.export.deployment import Deployment, Export, NamedRefused
from raysearch.deploy.export.formats import exporter, pools_exporter
from raysearch.deploy.export.pool_services import transfer_notes, transfer_violations, with_transfer
from raysearch.deploy.export.source import read_deployments, stated_deployments
from sim.config.code import Origin
from sim.config.question import Question
from sim.json_object import JsonObject

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class ExportResult(Result):
    """Commands and files of a deployment, and what they leave out.

    Attributes:
        to: The target.
        deployments: What is run, by the name of its pool; "" of a single one.
        exports: The same in the target's words; "" is what was written for all pools together.
    """

    to: str
    deployments: Mapping[str, Deployment]
    exports: Mapping[str, Export]

    @classmethod
    def of(
        cls,
        deployments: Mapping[str, Deployment],
        to: str,
        ops: Sequence[str] | None = None,
        longest_request: int | None = None,
    ) -> ExportResult:
        """Writes deployments for a target.

        Args:
            deployments: By the name of the pool.
            to: See `raysearch.deploy.export.formats.exporter_names`.
            ops: Shard only these; None shards all.
            longest_request: Tokens, prompt and answer, no fewer than are priced; None as the deployments have it.

        Raises:
            InputError: There is no such target or op, the target cannot run it, or requests are longer.
        """
        write = exporter(to)
        if longest_request is not None:
            least = max(each.usual_request for each in deployments.values())
            if longest_request < least:
                raise InputError(
                    f"--set longest_request: expected at least {least:,} tokens, the prompt and the answer that are "
                    f"priced, got {longest_request:,}"
                )
            deployments = {pool: replace(each, longest_request=longest_request) for pool, each in deployments.items()}
        if ops is not None:
            from raysearch.deploy.export.cut import with_ops

            deployments = {pool: with_ops(each, ops) for pool, each in deployments.items()}
        engine = _engine_of(deployments, to)
        deployments = with_transfer(deployments, to, engine)
        together = pools_exporter(to) if len(deployments) > 1 else None
        try:
            made = {"": together(deployments)} if together else {p: write(each) for p, each in deployments.items()}
        except NamedRefused as error:
            made = {"": Export(None, violations=error.refused)}
            return cls(to, deployments, made)
        except ValueError as error:
            raise InputError(f"{to} cannot run it: {error}") from error
        pool, last = made.popitem()
        made[pool] = replace(
            last,
            notes=(*last.notes, *transfer_notes(deployments, engine)),
            violations=(*last.violations, *transfer_violations(deployments, engine)),
        )
        return cls(to, deployments, made)

    def measured_by(self, tool: str) -> ExportResult:
        """The same with a script that measures what was deployed, and what `tune-live` needs to start others like it.

        Args:
            tool: "aiperf", "vllm-bench", "genai-perf" or "guidellm".

        Raises:
            InputError: There is no such tool.
        """
        from raysearch.deploy.live.deployed_benchmark import BENCHMARK_SCRIPT, benchmark_files

        made = dict(self.exports)
        pool, last = made.popitem()
        added = benchmark_files(self.to, tool, self.deployments)
        note = f"URL=http://HOST:PORT sh {BENCHMARK_SCRIPT} measures it and prints what tune-live reads"
        written = replace(last, files={**last.files, **added}, notes=(*last.notes, note))
        return replace(self, exports={**made, pool: written})

    @property
    def feasible(self) -> bool:
        """Whether it breaks no limit where it runs."""
        return not any(export.violations for export in self.exports.values())

    @property
    def command(self) -> str:
        """What starts it, of several pools one after the other; "" where files are applied by something else."""
        return "\n\n".join(each.command_text for each in self.exports.values() if each.command)

    @property
    def files(self) -> dict[str, str]:
        """Texts by path, the commands as scripts among them."""
        found = {
            Path(pool) / name: text for pool, each in self.exports.items() for name, text in each.all_files.items()
        }
        return {str(path): text for path, text in found.items()}

    def to_dict(self) -> JsonObject:
        """As `raysearch export --json` prints it: several pools by name, what is of all together beside them."""
        by_pool: dict[str, JsonObject] = {
            pool: {
                "to": self.to,
                **priced_dict(each.workload),
                "strategy": strategy_dict(each.strategy),
                "replicas": each.replicas,
            }
            for pool, each in self.deployments.items()
        }
        for pool, export in self.exports.items():
            by_pool.setdefault(pool, {"to": self.to}).update(
                command=export.command_text,
                files=dict(export.files),
                violations=list(export.violations),
                dropped=list(export.dropped),
                notes=list(export.notes),
            )
        whole = by_pool.pop("", {})
        return {**whole, "pools": by_pool} if by_pool else whole

    def _in_python(self, text: str) -> str:
        return text  # whose options are the engine's

    def to_rows(self) -> list[JsonObject]:
        """A row per file."""
        return [{"file": name, "text": text} for name, text in self.files.items()]

    def texts(self, *, with_files: bool = True) -> Iterator[str]:
        """What runs it, pool by pool: the command and, unless they are written elsewhere, its files."""
        for pool, export in self.exports.items():
            files = export.files.items() if with_files else ()
            titled = [f"# {name}\n{text.rstrip()}" if export.command else text.rstrip() for name, text in files]
            title = [f"# The {pool} pool"] if pool else []
            yield "\n".join([*title, "\n\n".join([*([export.command_text] if export.command else []), *titled])])

    def heading(self) -> Iterator[str]:
        """What breaks a limit, and what is deployed, a line for each."""
        for pool, export in self.exports.items():
            yield from (f"{pool}: " * bool(pool) + f"infeasible: {text}" for text in export.violations)
        for pool, each in self.deployments.items():
            yield f"{pool}: " * bool(pool) + priced_text(each.workload)

    def remarks(self) -> Iterator[str]:
        """What the target has no option for, and what its user must know."""
        for pool, export in self.exports.items():
            if pool:
                yield f"the {pool} pool:"
            yield from (f"left out: {text}" for text in export.dropped)
            yield from (f"note: {text}" for text in export.notes)

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch export` prints."""
        yield from self.heading()
        yield from self.texts()
        yield from self.remarks()

    def write(self, folder: str | Path) -> None:
        """Writes its files, all or none. Raises: InputError: The folder has results."""
        from raysearch.processes.claim import check_folder

        check_folder(Path(folder), "")
        write_together(Path(folder), {path: text.encode() for path, text in self.files.items()})


def _engine_of(deployments: Mapping[str, Deployment], to: str) -> str:
    """The engine that a target runs: its own, or of Dynamo the workload's."""
    charged = next(iter(deployments.values())).workload.engine
    return {"llm-d": "vllm", "dynamo": charged.family if charged else "vllm"}.get(to, to)


def deployments_of(
    source: str | Path | Result,
    question: Question | None = None,
    alternative: int = 0,
    serve: str | None = None,
    replicas: int = 1,
) -> dict[str, Deployment]:
    """What an answer, or the folder or file of one, says to run; see `raysearch.api.export`."""
    if isinstance(source, str | Path):
        return read_deployments(Path(source), question, alternative, serve)
    asked = getattr(source, "question", None)
    if not isinstance(asked, Question):
        raise InputError(f"expected an answer with a strategy to export, got {type(source).__name__}")
    fields = {"replicas": replicas, **source.to_dict()}
    return stated_deployments("the answer", fields, question or asked, alternative, serve, Origin.USER)
