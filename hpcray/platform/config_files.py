"""Configuration files: the settings of a site and of a user, below those of the environment.

In this order, of which the later ones win: `/etc/hpcray.toml`; the file that $HPCRAY_CONFIG names, for a modulefile;
`$XDG_CONFIG_HOME/hpcray/config.toml`, by default in `~/.config`, of the user; then `HPCRAY_*` variables; then
arguments.

A key is the name of a setting in lower case: of `Config` or `LaunchConfig`. A table `[partitions.NAME]` holds settings
for one partition, over those before it. Every process reads the files of its own machine, once, so that a job sees on
each node what the site has put there; a submitted job has the submitter's environment, $HPCRAY_CONFIG included.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from hpcray.common.config import (
    OTLP_FILE,
    PREFIX,
    RAY_VARIABLES,
    REMOVED_SETTINGS,
    SIZES,
    Config,
    LaunchConfig,
    convert,
    parse_size,
)

SYSTEM_FILE = "/etc/hpcray.toml"
VARIABLE = "HPCRAY_CONFIG"
"""Names a further file: an absolute path."""
_PARTITIONS = "partitions"
_PARTITION_VARIABLES = ("SLURM_JOB_PARTITION", "PBS_QUEUE")
_PATHS = frozenset(
    {
        "checkpoint_dir",
        "jobs",
        "journal_dir",
        "log_dir",
        "metrics_export",
        "mpirun",
        "safe_directories",
        "spill_dir",
        "start_dir",
        "tmpdir",
    }
)
_SIMILARITY = 0.6
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([\w\"'.-]+?)\s*=")
_FIELDS: dict[str, type[Config] | type[LaunchConfig]] = {
    **dict.fromkeys(LaunchConfig.__struct_fields__, LaunchConfig),
    **dict.fromkeys(Config.__struct_fields__, Config),
}
SETTINGS = (*LaunchConfig.__struct_fields__, *Config.__struct_fields__)
"""Names of all settings."""


class ConfigFileError(ValueError):
    """A configuration file cannot be used; the message has the file, the line and a hint."""


class FileSetting(Struct, frozen=True):
    """A setting in a configuration file.

    Attributes:
        name: of the setting.
        text: its value, as the variable would have it; before variables and ~ in paths are replaced.
        where: the file and the line, `/etc/hpcray.toml:3`.
        partition: for which it counts; "": for all.
    """

    name: str
    text: str
    where: str
    partition: str = ""


class SettingSource(Struct, frozen=True):
    """The value of a setting, and where it comes from.

    Attributes:
        name: of the setting.
        value: of it, in the type of its field.
        source: "default", the name of a variable, or a file and a line.
    """

    name: str
    value: Any
    source: str


_read: dict[tuple[tuple[str, str], ...], tuple[FileSetting, ...]] = {}


def config_files(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The paths at which files may be, in the order in which they are read, each with what names it.

    Raises:
        ConfigFileError: HPCRAY_CONFIG is no absolute path.
    """
    found = [(SYSTEM_FILE, "")]
    if named := environ.get(VARIABLE, ""):
        path = os.path.expanduser(named)
        if not os.path.isabs(path):
            raise ConfigFileError(f"{VARIABLE}={named!r} is not an absolute path; hint: {os.path.abspath(path)}")
        found.append((path, VARIABLE))
    home = environ.get("XDG_CONFIG_HOME") or (os.path.join(environ["HOME"], ".config") if environ.get("HOME") else "")
    if os.path.isabs(home):
        found.append((os.path.join(home, "hpcray", "config.toml"), ""))
    return found


def file_settings(environ: Mapping[str, str]) -> tuple[FileSetting, ...]:
    """The settings in all files, in the order in which they are read. Each process reads a file once.

    Raises:
        ConfigFileError: a file cannot be read, is no TOML, or has an unknown key or a wrong value.
    """
    paths = tuple(config_files(environ))
    if paths not in _read:
        _read[paths] = tuple(setting for path, named in paths for setting in _settings_in(path, bool(named)))
    return _read[paths]


def configured_environment(environ: Mapping[str, str], partition: str | None = None) -> Mapping[str, str]:
    """The environment with the settings of the configuration files as `HPCRAY_*` variables, where it has none of its
    own.

    Args:
        environ: this process's environment; it stays as it is.
        partition: whose settings count; None: that of the job around.

    Raises:
        ConfigFileError: as from `file_settings`.
    """
    found = _applied(environ, partition)
    return {**{PREFIX + name.upper(): text for name, (text, _) in found.items()}, **environ} if found else environ


def node_config(environ: Mapping[str, str], **given: Any) -> Config:
    """`Config.from_env`, with the settings of the configuration files below those of the environment.

    Raises:
        ValueError: a setting is not valid.
    """
    found = Config.from_env(configured_environment(environ), **given)
    if not found.trace:
        return found
    # Processes of the job may run in other directories.
    return replace(found, trace=OTLP_FILE + os.path.abspath(found.trace.removeprefix(OTLP_FILE)))


def launch_config(environ: Mapping[str, str], partition: str | None = None) -> LaunchConfig:
    """`LaunchConfig.from_env`, with the settings of the configuration files below those of the environment.

    Args:
        environ: this process's environment.
        partition: whose settings count; None: that of the job around.

    Raises:
        ValueError: a setting is not valid.
    """
    return LaunchConfig.from_env(configured_environment(environ, partition))


def setting_sources(environ: Mapping[str, str], partition: str | None = None) -> list[SettingSource]:
    """All settings that a process with this environment has, with their sources.

    Raises:
        ValueError: a setting is not valid.
    """
    files = _applied(environ, partition)
    seen = configured_environment(environ, partition)
    values = {**asdict(LaunchConfig.from_env(seen)), **asdict(Config.from_env(seen))}
    rows = []
    for name in SETTINGS:
        variable, rays = PREFIX + name.upper(), RAY_VARIABLES.get(name, "")
        source = next((known for known in (variable, rays) if known in environ), "")
        source = source or (files[name][1] if name in files else "default")
        rows.append(SettingSource(name, values[name], source))
    return rows


def _applied(environ: Mapping[str, str], partition: str | None) -> dict[str, tuple[str, str]]:
    """The settings of the files that count: the text and the place of each, by name."""
    settings = file_settings(environ)
    if not settings:
        return {}
    if partition is None:
        partition = next((text for name in _PARTITION_VARIABLES if (text := environ.get(name))), "")
    found: dict[str, tuple[str, str]] = {}
    for row in settings:
        if row.partition not in ("", partition) or RAY_VARIABLES.get(row.name, "") in environ:
            continue
        text = _expanded(row.text, environ) if row.name in _PATHS else row.text
        if text is not None:
            found[row.name] = text, row.where
    return found


def _expanded(path: str, environ: Mapping[str, str]) -> str | None:
    """A path with its variables and ~ replaced; None where a variable is not set: on a login node there is no
    $SLURM_TMPDIR, and what is below it in the order counts there."""
    names = [plain or braced for plain, braced in _REFERENCE.findall(path)]
    if not all(environ.get(name) for name in names):
        return None
    return os.path.expanduser(_REFERENCE.sub(lambda match: environ[match[1] or match[2]], path))


def _settings_in(path: str, required: bool) -> Iterable[FileSetting]:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ConfigFileError(f"{VARIABLE} names {path}, which does not exist; hint: unset {VARIABLE}") from None
        return []
    except OSError as error:
        hint = f"unset {VARIABLE}" if required else "the file must be readable for all of its users"
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}; hint: {hint}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigFileError(f"{path}:{line}: this is not UTF-8; hint: iconv -t utf-8") from None
    return _parse(path, text)


def _parse(path: str, text: str) -> list[FileSetting]:
    loads = _toml_parser()
    try:
        tables = loads(text)
    except ValueError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{path}:{line[1]}" if line else f"{path}:{text.count(chr(10)) + 1}"
        raise ConfigFileError(f'{place}: {error}; hint: text needs quotes: partition = "cpu"') from None
    lines = _line_numbers(text)
    partitions = tables.pop(_PARTITIONS, {})
    found = [_setting(path, lines, "", name, value) for name, value in tables.items()]
    if not isinstance(partitions, dict):
        raise ConfigFileError(
            f"{path}:{lines.get(('', _PARTITIONS), 1)}: {_PARTITIONS} is a table of tables; hint: [{_PARTITIONS}.gpu]"
        )
    for partition, table in partitions.items():
        if not isinstance(table, dict):
            number = lines.get((_PARTITIONS, partition), 1)
            raise ConfigFileError(f"{path}:{number}: {partition} is no table; hint: [{_PARTITIONS}.{partition}]")
        found += [_setting(path, lines, partition, name, value) for name, value in table.items()]
    return found


def _setting(path: str, lines: Mapping[tuple[str, str], int], partition: str, name: str, value: Any) -> FileSetting:
    table = f"{_PARTITIONS}.{partition}" if partition else ""
    inner = next((line for (place, _), line in lines.items() if place.startswith(f"{name}.")), 1)
    where = f"{path}:{lines.get((table, name)) or lines.get((name, '')) or inner}"
    config = _FIELDS.get(name)
    if isinstance(value, dict):
        raise ConfigFileError(f"{where}: there is no table [{name}]; hint: [{_PARTITIONS}.gpu], or no table at all")
    if config is None:
        raise ConfigFileError(f"{where}: {name} is no setting; hint: {_suggestion(name)}")
    wanted = value
    if isinstance(value, str) and name in SIZES:
        with contextlib.suppress(ValueError):  # text that is no size stays as it is, and is refused
            wanted = parse_size(value)
    try:
        convert(config, {name: wanted}, {name: f"{name} = {value!r}"}, strict=True)
    except ValueError as error:
        text = str(error).replace("yes and no are 1 and 0", "yes and no are true and false")
        raise ConfigFileError(f"{where}: {text}") from None
    return FileSetting(name, _as_text(value), where, partition)


def _suggestion(name: str) -> str:
    from difflib import get_close_matches

    if name in REMOVED_SETTINGS:
        return f"remove the line; {REMOVED_SETTINGS[name]}"
    near = get_close_matches(name.lower().removeprefix(PREFIX.lower()), SETTINGS, 1, _SIMILARITY)
    return f"{near[0]}?" if near else "hpcray config show lists the settings"


def _as_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else value if isinstance(value, str) else repr(value)


def _line_numbers(text: str) -> dict[tuple[str, str], int]:
    """The line of each key by its table and name, and of each table by its name and "". For messages: keys inside text
    of several lines may be taken for keys."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _TABLE.fullmatch(line)) is not None:
            table = _plain(header[1])
            found.setdefault((table, ""), number)
        elif (key := _KEY.match(line)) is not None:
            path, _, name = ".".join(filter(None, (table, _plain(key[1])))).rpartition(".")
            found.setdefault((path, name), number)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[\"'\s]", "", name)


def _toml_parser() -> Callable[[str], dict[str, Any]]:
    if sys.version_info >= (3, 11):
        from tomllib import loads  # imported only where there is a file
    else:
        from tomli import loads
    parse: Callable[[str], dict[str, Any]] = loads
    return parse
