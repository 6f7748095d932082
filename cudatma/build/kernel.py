"""Functions that load the Kernel for a template or a source from memory or disk, or compile it with NVRTC.

If several callers request a kernel at the same time, only one of them compiles it.

The key of an artifact is a digest of its inputs: the template and all files that it includes, the config's class and
init fields, the code of the config's properties, the target, the NVRTC version and the options. Loading a cached kernel
therefore renders nothing and creates no NVRTC program.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cudatma import context
from cudatma.build.cache import Artifact, Cache, canonical, default_root, digest
from cudatma.build.files import content, read_source
from cudatma.build.includes import includes_of
from cudatma.build.nvcc import nvcc_fingerprint
from cudatma.build.nvrtc import compile_flags, compile_source, nvrtc_fingerprint, nvrtc_version, source_options
from cudatma.build.render import is_like_template, line_name, primitives_of, render, template_root, template_texts
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheError,
    CompileError,
    DriverError,
    LaunchError,
    TargetError,
    TemplateError,
)
from cudatma.runtime.compiler_log import performance_losses
from cudatma.runtime.launch import Kernel
from cudatma.runtime.launch_args import entries
from cudatma.target import Target, detect, get_target

TARGET_VARIABLE = "CUDATMA_TARGET"
DEBUG_VARIABLE = "CUDATMA_DEBUG"
_TARGET_WITHOUT_GPU = "sm_90a"
_SCHEMA = 2
TEMPLATE_SUFFIX = ".j2"
CUDA_SUFFIXES = (".cu", ".cuh")
#: File name for CUDA text that comes from no file.
_NO_FILE = "kernel.cu"
#: Python files that determine the rendered text of every template.
_COMMON_CODE = (
    *("dtypes.py", "layout.py", "pipeline.py", "target.py", "build/render.py", "build/library.py"),
    *("kernels/launch_struct.py", "kernels/schedule.py"),
)


@dataclass(frozen=True, slots=True)
class Order:
    """A request for a kernel.

    Attributes
    ----------
    facts : dict
        Inputs that the key digests.
    source : callable
        Function that renders the source.
    target : Target
        Architecture.
    entry : str or None
        Name of the kernel, or None for the only kernel in the source.
    options : tuple of str
        The caller's options for NVRTC.
    smem_layout : tuple of tuple, default: ()
        Shared-memory layout from the config.
    is_plain : bool, default: False
        Whether the source is a caller's text that was not rendered.
    file : str, default: "kernel.cu"
        Name of the source's file.
    folder : str, default: "/"
        Folder of the source's file.
    """

    facts: dict[str, Any]
    source: Callable[[], str]
    target: Target
    entry: str | None
    options: tuple[str, ...]
    smem_layout: tuple[tuple[str, int, int], ...] = ()
    is_plain: bool = False
    file: str = _NO_FILE
    folder: str = "/"


#: Value of the innermost debugging() context, or None outside a context.
debug_scope: ContextVar[bool | None] = ContextVar("cudatma_debug", default=None)


_UNDEFINED = re.compile(r'identifier "(\w+)" is undefined')
_TEMPLATE_HINT = (
    'the text has "//% include" or other template syntax but was compiled as plain CUDA; if it is a template, '
    f"pass template=True (--template for cudatma emulate) or a path that ends in {TEMPLATE_SUFFIX}"
)


class Kernels:
    """Kernels of a process, owned by the Runtime.

    Attributes
    ----------
    known : dict
        Kernels by the arguments of load_kernel() and by the artifact's key.
    building : dict
        A lock for each key that is being built.
    caches, nvrtc_versions : dict
        Caches and NVRTC versions by cache folder.
    compile_seconds : float
        Time spent in NVRTC in seconds.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[Any, Kernel] = {}
        self.building: dict[str, threading.Lock] = {}
        self.caches: dict[Path, Cache] = {}
        self.nvrtc_versions: dict[Path, tuple[int, int]] = {}
        self.compile_seconds = 0.0


def _store() -> Kernels:
    return context.runtime().part(Kernels)


def compile_seconds() -> float:
    """Return the number of seconds that this process has spent in NVRTC."""
    return _store().compile_seconds


@contextmanager
def debugging(debug: bool = True) -> Iterator[None]:
    """Build kernels in debug mode inside the context, regardless of $CUDATMA_DEBUG.

    Parameters
    ----------
    debug : bool, default True
        Whether kernels limit the duration of their waits and check their accesses. The setting applies to this thread
        or task.

    Yields
    ------
    None
        None.

    Raises
    ------
    ArgumentTypeError
        If ``debug`` is not a bool.
    """
    if not isinstance(debug, bool):
        raise ArgumentTypeError("debug", type(debug).__name__, "bool")
    token = debug_scope.set(debug)
    try:
        yield
    finally:
        debug_scope.reset(token)


def wants_debug(debug: bool | None) -> bool:
    """Return whether debug mode is on.

    ``debug`` has the highest precedence. If it is None, the innermost debugging() context applies, and without a
    context, $CUDATMA_DEBUG. Raises ArgumentTypeError or ArgumentError if a value is invalid.
    """
    if debug is None:
        debug = debug_scope.get()
    if isinstance(debug, bool):
        return debug
    if debug is not None:
        raise ArgumentTypeError("debug", type(debug).__name__, "a bool, or None to use $CUDATMA_DEBUG")
    named = os.environ.get(DEBUG_VARIABLE, "")
    if named not in ("", "0", "1"):
        raise ArgumentError(DEBUG_VARIABLE, named, "0, 1")
    return named == "1"


def load_kernel(template: str, config: Any, target: str | Target, *, debug: bool | None = None) -> Kernel:
    """Return the kernel ``config.entry`` of one of cudatma's templates for a config and a target.

    ``template`` is a name below ptx_templates/. ``debug`` is as for compile(). Raises TemplateError, TargetError,
    CompileError and CacheError as compile() does, and DriverError if NVRTC is missing.
    """
    chosen, debug = get_target(target), wants_debug(debug)
    key = (template, config, chosen.name, debug)
    try:
        # Reading the template's files at every call would take longer than a launch.
        known = (store := _store()).known.get(key)
    except TypeError:  # the config is not hashable
        return _have(_from_template(template, config, chosen, config.entry, (), debug))
    if known is None:
        known = store.known[key] = _have(_from_template(template, config, chosen, config.entry, (), debug))
    return known


def known_kernel(template: str, config: Any, target: str | Target, *, debug: bool | None = None) -> Kernel | None:
    """Return the kernel if this process has loaded it, otherwise None. No file is read or compiled."""
    return _store().known.get((template, config, get_target(target).name, wants_debug(debug)))


def compile(
    source_or_template: str | os.PathLike[str],
    config: Any = None,
    *,
    target: str | Target | None = None,
    entry: str | None = None,
    template: bool = False,
    options: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    defines: Mapping[str, object] | Sequence[str] = (),
    debug: bool | None = None,
) -> Kernel:
    """Compile a kernel, or return it from the cache.

    Parameters
    ----------
    source_or_template : str or path
        CUDA C++ text, the path of a .cu file, or a name that ends in ".j2": one of cudatma's templates, or the path of
        another template.
    config : dataclass instance, optional
        The frozen dataclass that a template reads as ``config``.
    target : str or Target, optional
        Architecture. Default: $CUDATMA_TARGET if it is set, otherwise the target of the GPU, or sm_90a if there is no
        GPU.
    entry : str, optional
        The kernel's name, or a part that only this kernel's name contains. Default: ``config.entry`` if
        there is a config, otherwise the only kernel.
    template : bool, default False
        Whether the text is a template. A ".j2" file is always a template. In a template, ``//% use "mbarrier_init"``
        selects a primitive, and ``${ config.x }`` prints a field. Other text is compiled unchanged. In both cases,
        errors and hazards refer to the line numbers of the text.
    options : sequence of str, optional
        Further options for NVRTC, such as ``"--std=c++20"``.
    include_dirs : sequence of path, optional
        Folders of included files. CUDA's headers need no folder, because cudatma finds them in $CUDA_HOME or
        $CUDA_PATH, NVIDIA's wheels (the extra ``headers``), an installed toolkit, or CuPy.
    defines : mapping or sequence of str, optional
        Macros, as ``{"NAME": value}`` or ``["NAME=value"]``.
    debug : bool, optional
        Whether primitives limit their waits to $CUDATMA_DEBUG_TIMEOUT seconds (2 by default) and check their arguments.
        A launch then waits until the kernel ends and may raise PipelineHang, as docs/howto/debug_a_hang.md describes.
        Default: True if $CUDATMA_DEBUG is 1, otherwise False.

    Returns
    -------
    Kernel
        The kernel. Its source, PTX, cubin and log can be read without a GPU.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError
        If an argument is invalid.
    TemplateError, CompileError
        If the template cannot be rendered, or the compiler rejects the source. A source with host code needs nvcc. If
        nvcc is missing, the error contains the command to run.
    CacheError, DriverError
        If the cache folder is unsafe, or NVRTC is not installed.

    Examples
    --------
    >>> source = 'extern "C" __global__ void one(int* x) { *x = 1; }'
    >>> kernel = cudatma.compile(source, target="sm_90a")
    >>> kernel.entry
    'one'
    """
    if not isinstance(source_or_template, str | os.PathLike):
        raise ArgumentTypeError("source_or_template", type(source_or_template).__name__, "str or a path")
    if not isinstance(template, bool):
        raise ArgumentTypeError("template", type(template).__name__, "bool")
    debug = wants_debug(debug)
    chosen = default_target() if target is None else get_target(target)
    flags = source_options(options, include_dirs, defines)
    name = getattr(config, "entry", None) if entry is None else entry
    text = os.fspath(source_or_template)
    if "\n" not in text and text.endswith(TEMPLATE_SUFFIX):
        own = getattr(config, "template", text)
        if own != text and (template_root() / text).is_file():
            got = f"{type(config).__name__} for {own}"
            raise ArgumentError("config", got, f"a config for {text}", f"compile {own!r} or pass another config")
        try:
            return _have(_from_template(text, config, chosen, name, flags, debug))
        except TemplateError:
            if not os.path.isfile(text):  # False also for text that cannot be a path
                raise
    return _have(source_order(text, config, chosen, name, flags, debug, template))


def source_order(
    text_or_path: str,
    config: Any,
    target: Target,
    entry: str | None,
    options: tuple[str, ...],
    debug: bool = False,
    is_template: bool = False,
    field: str = "source_or_template",
) -> Order:
    """Return the order for a kernel in CUDA text or in a .cu or .j2 file.

    Raises TemplateError if a template cannot be rendered, and an ArgumentError with the name ``field`` if a file cannot
    be read.
    """
    text, file, folder = text_or_path, _NO_FILE, "/"
    if "\n" not in text and text.endswith((*CUDA_SUFFIXES, TEMPLATE_SUFFIX)):
        is_template = is_template or text.endswith(TEMPLATE_SUFFIX)
        file = os.path.basename(text).removesuffix(TEMPLATE_SUFFIX)
        text, folder = read_source(text, field), os.path.dirname(os.path.abspath(text))
    if is_template:
        text = render(text, config, target, is_source=True, name=file, debug=debug)
    layout = _smem_layout(config)
    facts = {"source": text, "smem_layout": layout} | ({} if file == _NO_FILE else {"file": file})
    return Order(facts, lambda: text, target, entry, options, layout, not is_template, file, folder)


def default_target() -> Target:
    """Return the target of compilations and emulations that do not specify a target.

    The target is $CUDATMA_TARGET if this variable is set, otherwise the target of the current device, or sm_90a if
    cudatma supports no device on this machine. Raises TargetError if the variable contains an unknown name.
    """
    named = os.environ.get(TARGET_VARIABLE)
    if named:
        try:
            return get_target(named)
        except TargetError as error:
            raise TargetError(TARGET_VARIABLE, named, error.allowed, "unset it to use the GPU's target") from None
    try:
        return detect(context.current_device())
    except (
        DriverError,
        LaunchError,
        TargetError,
        ImportError,
    ):  # LaunchError: the process was forked after CUDA was initialized
        return get_target(_TARGET_WITHOUT_GPU)


def _from_template(
    template: str, config: Any, chosen: Target, entry: str | None, options: tuple[str, ...], debug: bool
) -> Order:
    kind: Any = type(config)
    files, code = _file_digests(template), _code_digests(kind)
    facts = {"template": template, "files": files, "config": config, "code": code, "entry": entry}
    facts |= {"debug": True} if debug else {}

    def source() -> str:
        text = render(template, config, chosen, debug=debug)
        if _file_digests(template) != files:
            raise TemplateError(f"template {template!r} changed while it was being compiled; compile the kernel again")
        return text

    return Order(facts, source, chosen, entry, options, _smem_layout(config))


def _smem_layout(config: Any) -> tuple[tuple[str, int, int], ...]:
    """Return a config's shared-memory layout.

    The ``barriers`` of a PipelineSpec ring become full and empty barriers.
    """
    layout = getattr(config, "smem_layout", None)
    parts: list[tuple[str, int, int]] = []
    for name, offset, size in layout() if callable(layout) else ():
        if name == "barriers" and hasattr(config, "ring"):
            parts += config.ring.barrier_layout(base=offset)
        else:
            parts.append((name, offset, size))
    return tuple(parts)


def _file_digests(template: str) -> list[str]:
    """Return a digest of the current contents of each file that the template can include."""
    return [_digest(text) for text in template_texts(template).values()]


@lru_cache(maxsize=512)
def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=64)
def _code_digests(kind: Any) -> list[str]:
    """Return digests of the Python files on which a config's properties and the rendered text depend.

    The fields alone do not determine the text, because properties compute values from the fields. Each class is
    digested only once, because editing its file does not change the class in memory, and reloading the module creates
    another class.
    """
    return [_digest(content(path)) for path in _code_files(kind)]


def _code_files(kind: type) -> tuple[str, ...]:
    """Return the common files, and the files of a class and its bases.

    For a class from a kernel family, the result contains all files of the family's package.
    """
    package = Path(__file__).parents[1]
    files = {package / name for name in _COMMON_CODE}
    for module in {base.__module__ for base in kind.__mro__} - {"abc", "builtins"}:
        own = getattr(sys.modules.get(module), "__file__", None)
        if own is not None:
            is_family = Path(own).is_relative_to(package / "kernels") and Path(own).parent != package / "kernels"
            files |= set(Path(own).parent.glob("*.py")) if is_family else {Path(own)}
    return tuple(sorted(map(str, files)))


def is_cached(template: str, config: Any, target: str | Target) -> bool:
    """Return whether load_kernel() would find the kernel in this process or on disk instead of compiling it."""
    chosen, debug = get_target(target), wants_debug(None)
    if known_kernel(template, config, chosen) is not None:
        return True
    key, _ = _identity(_from_template(template, config, chosen, config.entry, (), debug))
    return _cache(default_root()).get(key) is not None


@contextmanager
def compiling_alone() -> Iterator[bool]:
    """Prevent other processes that use the cache folder from compiling the same kernels at the same time.

    The other processes wait, and then find the kernels in the cache. The context yields False if the folder cannot be
    written, because other processes cannot find the kernels in this case.
    """
    cache = _cache(default_root())
    with _locked(cache, digest({"compiling": "many kernels"})):
        yield cache.folder is not None


@contextmanager
def _locked(cache: Cache, key: str) -> Iterator[None]:
    """Lock a key of the cache, or issue a warning and continue if another process does not release the key."""
    with ExitStack() as held:
        try:
            held.enter_context(cache.lock(key))
        except CacheError as error:
            # Another process might now also compile the kernel. This is safe, because each entry is renamed into place
            # as a whole.
            warnings.warn(f"compiling without a lock: {error}", RuntimeWarning, stacklevel=2)
        yield


def _identity(order: Order) -> tuple[str, dict[str, Any]]:
    """Return the key for an order's artifact, and the facts that the key digests."""
    flags = compile_flags(order.target, order.options)
    version = _nvrtc_version(default_root())
    facts = order.facts | {"schema": _SCHEMA, "target": order.target, "flags": flags, "nvrtc": version}
    if "source" in facts:
        # nvcc compiles the sources that NVRTC rejects because they contain host code.
        facts |= {"nvcc": nvcc_fingerprint()}
        if includes := includes_of(facts["source"], order.options, order.folder, version[0]):
            facts |= {"includes": includes}
    return digest(facts), facts


def _is_storable(facts: dict[str, Any]) -> bool:
    """Return whether the key digests every file that the source can include. If it does not, each call compiles."""
    includes = facts.get("includes")
    return includes is None or includes.is_complete


def _have(order: Order) -> Kernel:
    """Return the kernel for an order from memory, from disk, or newly compiled."""
    key, facts = _identity(order)
    if not _is_storable(facts):
        return _kernel(_load(key, facts, order), order)
    name, store = (key, order.entry), _store()
    known = store.known.get(name)
    if known is not None:
        return known
    with store.lock:
        building = store.building.setdefault(key, threading.Lock())
    try:
        with building:
            known = store.known.get(name)
            if known is None:
                known = store.known[name] = _kernel(_load(key, facts, order), order)
            return known
    finally:
        with store.lock:
            store.building.pop(key, None)


def _nvrtc_version(root: Path) -> tuple[int, int]:
    """Return NVRTC's version from the cache at ``root``, or from NVRTC if the cache does not contain it."""
    versions = _store().nvrtc_versions
    if root not in versions:
        fingerprint = nvrtc_fingerprint()
        major, minor = _remembered(root, {"nvrtc": fingerprint}, nvrtc_version) if fingerprint else nvrtc_version()
        versions[root] = int(major), int(minor)
    return versions[root]


def _remembered(root: Path, facts: Any, find: Callable[[], Any]) -> Any:
    """Return the result that the cache folder stores for ``facts``, or compute and store it. Both values are JSON."""
    key, cache = digest(facts), _cache(root)
    known = cache.recall(key)
    if known is None:
        known = find()
        cache.remember(key, known)
    return known


def load_ptx(order: Order) -> tuple[str, str]:
    """Return the source and the PTX for an order, from disk or newly compiled."""
    artifact = _load(*_identity(order), order)
    return artifact.text("kernel.cu"), artifact.text("kernel.ptx")


def _load(key: str, facts: dict[str, Any], order: Order) -> Artifact:
    cache = _cache(default_root())
    if not _is_storable(facts):
        return Artifact(key, None, _compile(cache, key, facts, order))
    artifact = cache.get(key)
    if artifact is None:
        with _locked(cache, key):
            artifact = cache.get(key)
            if artifact is None:
                artifact = cache.put(key, _compile(cache, key, facts, order))
    return artifact


def _compile(cache: Cache, key: str, facts: dict[str, Any], order: Order) -> dict[str, bytes]:
    """Return the files of a new artifact.

    Raises CompileError if ptxas serializes the wgmmas of one of cudatma's templates.
    """
    source = order.source()
    with hinting(source, order.target, not order.is_plain):
        result = compile_source(
            source,
            order.target,
            name=order.file,
            options=order.options,
            keep=lambda files: cache.keep_failure(key, files),
            folder=order.folder,
        )
    _store().compile_seconds += result.seconds
    losses = performance_losses(result.log)
    if losses and "template" in order.facts and "debug" not in order.facts:
        folder = cache.keep_failure(key, {"kernel.cu": source.encode(), "log.txt": result.log.encode()})
        message = f"{order.entry} would be slow on {order.target.name} because {losses[0]}; choose another config"
        raise CompileError(message, result.log, source, None if folder is None else str(folder))
    record = facts | {"target": order.target.name, "seconds": round(result.seconds, 3)}
    record.pop("source", None)
    if order.is_plain and order.file != _NO_FILE:  # record the file name in the text
        source = f'#line 1 "{line_name(order.file)}"\n{source}'
    return {
        "kernel.cu": source.encode(),
        "kernel.ptx": result.ptx.encode(),
        "kernel.cubin": result.cubin,
        "log.txt": result.log.encode(),
        "config.json": json.dumps(canonical(record), indent=1).encode(),
    }


@contextmanager
def hinting(text: str, target: Target, is_template: bool) -> Iterator[None]:
    """Add a hint to a CompileError if the text may be a template or lacks a ``use`` statement."""
    try:
        yield
    except CompileError as error:
        hint = _primitive_hint(error, target) if is_template else _TEMPLATE_HINT if is_like_template(text) else ""
        if not hint:
            raise
        raise CompileError(f"{hint}\n{error.message}", error.log, error.source, error.folder, error.excerpt) from None


def _primitive_hint(error: CompileError, target: Target) -> str:
    """Return a hint if the template calls a primitive without ``use`` or outside its namespace, otherwise ""."""
    unknown = sorted(set(_UNDEFINED.findall(error.log)) & primitives_of(target))
    missing = [name for name in unknown if not re.search(rf"__forceinline__ [^(]*\b{name}\(", error.source)]
    if missing:
        names = ", ".join(f'"{name}"' for name in missing)
        return f"the template calls primitives that it does not select; add the line: //% use {names}"
    return f"{unknown[0]} is in namespace cudatma; add the line: using namespace cudatma;" if unknown else ""


def _choose_entry(ptx: str, named: str | None) -> str:
    known = list(entries(ptx))
    if not known:
        remedy = 'write extern "C" __global__ void name(...), or instantiate a template explicitly'
        raise ArgumentError("source", "no kernel", "text that contains a kernel", remedy)
    if named in known:
        return str(named)
    from cudatma.emulator.ptx.names import find_name  # slow to import

    return find_name(named or "", known, "entry", "kernels")


def _kernel(artifact: Artifact, order: Order) -> Kernel:
    ptx = artifact.text("kernel.ptx")
    return Kernel(
        artifact.read("kernel.cubin"),
        _choose_entry(ptx, order.entry),
        order.target,
        ptx=ptx,
        source=artifact.text("kernel.cu"),
        log=artifact.text("log.txt"),
        folder=artifact.folder,
        smem_layout=order.smem_layout,
    )


def _cache(root: Path) -> Cache:
    """Return the Cache of a folder."""
    store = _store()
    with store.lock:
        if root not in store.caches:
            store.caches[root] = Cache(root)
        return store.caches[root]
