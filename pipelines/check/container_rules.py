"""Rules about tasks and their containers: caching, placeholders, images, variables and secrets."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardline.components.code import largest
from shardline.components.custom_job import IMAGE, argv, list_at, literal_string, mapping_at
from shardline.components.text import truncate
from shardline.pipelines.check.checks import Found, rules
from shardline.pipelines.check.job_rules import JOB_PARAMETERS
from shardline.pipelines.check.pipeline import (
    PARAMETER,
    PLACEHOLDER,
    UNKNOWN,
    Executor,
    Job,
    Parameter,
    Pipeline,
    Pool,
    Target,
    Task,
    payload_of,
    strings,
)
from shardline.pipelines.settings import placeholder
from shardline.pipelines.spec import OWN_PIPELINES

#: Images whose tags do not matter: prebuilt ones of Vertex AI, for which the documentation requires the tag
#: `latest`, and those of Google Cloud Pipeline Components, which names each version once.
_RELEASED = re.compile(
    r"(us|europe|asia)-docker\.pkg\.dev/vertex-ai(-restricted)?/|gcr\.io/cloud-aiplatform/"
    r"|gcr\.io/ml-pipeline/google-cloud-pipeline-components:"
)


@rules(Pipeline)
def images(pipeline: Pipeline) -> Found:
    """Names of images.

    A different image with the same name changes what a pipeline does, and caching does not notice. A local
    run ignores names without a registry.

    SL403 warning: An image is named by digest.
        Fix: name it by digest, NAME@sha256:..., which a push prints
        Source: artifact-registry/docs/docker/names.
    SL411 error: An image is REGISTRY/PATH:TAG@DIGEST; your own names its registry.
        Fix: name it LOCATION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG in the settings (in your own
            pipeline: with_image), and compile
        Source: artifact-registry/docs/docker/names.
    SL412 error: The placeholders of the example settings are replaced.
        Fix: write your own project and bucket
        Source: settings/vertex.toml.example.
    """
    of_tasks = {literal_string(executor.container.get("image")) for executor in pipeline.executors}
    found = sorted(filter(None, of_tasks | {pool.image for job in pipeline.jobs for pool in job.pools}))
    for image in found:
        if not IMAGE.fits(image):
            yield "SL411", f"the image {image!r} is not {IMAGE.description}"
        tag = image.rpartition("/")[2].partition(":")[2]
        can_move = _has_registry(image) or tag in ("", "latest")
        if can_move and "@" not in image and not _RELEASED.match(image):
            yield "SL403", f"the image {image} is named without a digest, and can be moved"
    if pipeline.target is Target.LOCAL:
        return
    for image in found:
        is_own = pipeline.name in OWN_PIPELINES or re.match(r"shardline([:@-]|$)", image)
        if pipeline.target is Target.PLATFORM and is_own and not _has_registry(image):
            yield "SL411", f"the image {image} has no registry, so the platform cannot pull it"
    texts = [("the image", image) for image in found]
    given = [*pipeline.environment.items(), *(pipeline.given or {}).items()]
    texts += [(str(name), str(value)) for name, value in given]
    texts += [item for job in pipeline.jobs for item in job.spec.items() if isinstance(item[1], str)]
    for name, text in dict.fromkeys(texts):
        if word := placeholder(name, text):
            yield "SL412", f"{name} is {text!r}, where {word} stands for your own"


def _has_registry(image: str) -> bool:
    first, slash, _ = image.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


#: Limit of Linux for one argument of a process, in bytes, with its final NUL (MAX_ARG_STRLEN).
ARGUMENT_BYTES = 128 * 1024


@rules(Executor, Pool, Job)
def arguments(part: Executor | Pool | Job) -> Found:
    """Arguments of tasks and replicas.

    SL310 error: An argument of a container, component source and payload included, has less than 128 KiB.
        Fix: move sources and long lists into the image or into files
        Source: execve(2), MAX_ARG_STRLEN.
    SL407 warning: A container installs no packages when it starts.
        Fix: put the packages into the image, and set install_kfp_package=False
        Source: general/vpc-service-controls.
    """
    # A payload may be short in the template, and long with what the parameters put into it.
    found = [part.payload] if isinstance(part, Job) else argv(part.container)
    for argument in found:
        size = len(argument.encode(errors="replace"))
        if size >= ARGUMENT_BYTES:
            shown = f"{argument.strip()[:40]!r}..."
            if isinstance(part, Job) and (files := part.task.pipeline.code):
                shown = f"each of its {len(part.pools)} worker pools has your code: {largest(files)}"
            yield "SL310", f"an argument has {size:,} bytes: {shown}"
    if not isinstance(part, Job) and any("pip install" in argument for argument in found):
        yield "SL407", "pip install runs at every start"


_PLATFORM_VARIABLE = re.compile(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML)_\w+")


@rules(Pool)
def variables(pool: Pool) -> Found:
    """Environment variables of replicas.

    SL322 error: A replica sets a variable once, and none that the platform sets.
        Fix: set it once; leave out what the platform sets for each replica
        Source: training/distributed-training; ContainerSpec.
    """
    names = [str(item.get("name", "")) for item in pool.env]
    for name, count in Counter(name for name in names if "{{$" not in name).items():
        if _PLATFORM_VARIABLE.fullmatch(name):
            yield "SL322", f"the pool sets {name} itself"
        if count > 1:
            yield "SL322", f"the environment variable {name} is set {count} times"


@rules(Parameter, Task, Pool, Executor, Pipeline)
def secrets(part: Parameter | Task | Pool | Executor | Pipeline) -> Found:
    """Secrets that are readable in the console, in logs or in the file.

    SL811 error: No parameter, constant, variable, command, source or file of packed code holds a secret.
        Fix: read it from Secret Manager at run time (pass projects/PROJECT/secrets/NAME/versions/latest),
            remove it here, and revoke it
        Source: secret-manager/docs/best-practices.
    """
    match part:
        case Parameter():
            values = [(part.name, part.pipeline.value(part.name))]
        case Task():
            given = part.inputs("parameters").items()
            values = [(name, part.value(name)) for name, item in given if item and "runtimeValue" in item]
        case Pool():
            values = _variables(part.env)
        case Executor():
            commands = [("command", argument) for argument in argv(part.container)]
            values = [*_variables(list_at(part.container, "env")), *commands]
        case Pipeline():
            values = [(name, content.decode(errors="ignore")) for name, content in part.code.items()]
    for name, value in values:
        if kind := secret_kind(name, value):
            yield "SL811", f"{name} holds {kind}"


def _variables(env: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(str(item.get("name", "")), item.get("value")) for item in env]


#: Patterns of secrets with a documented prefix, alphabet or length.
_PATTERNS = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY( BLOCK)?-----"),
    "a Google API key": re.compile(r"\bAIza[0-9A-Za-z_-]{35}\b"),
    "a Google OAuth token": re.compile(r"\bya29\.[0-9A-Za-z_-]{20,}"),
    "a Google OAuth client secret": re.compile(r"\bGOCSPX-[0-9A-Za-z_-]{20,}"),
    "a Google OAuth refresh token": re.compile(r"\b1//0[0-9A-Za-z_-]{40,}"),
    "an AWS access key": re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),
    "an Azure account key": re.compile(r"AccountKey=[0-9A-Za-z+/]{86}=="),
    "a GitHub token": re.compile(r"\b(gh[pousr]_[0-9A-Za-z]{36,}|github_pat_[0-9A-Za-z_]{60,})"),
    "a GitLab token": re.compile(r"\bgl(pat|dt|rt|cbt|ptt)-[0-9A-Za-z_-]{20,}"),
    "a Slack token": re.compile(r"\bx(ox[abeoprs]|app)-[0-9A-Za-z-]{10,}"),
    "a Hugging Face token": re.compile(r"\bhf_[0-9A-Za-z]{30,}\b"),
    "an OpenAI or Anthropic key": re.compile(
        r"\bsk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[A-Z])[\w-]{32,}", re.ASCII
    ),
    "a JSON Web Token": re.compile(r"(?<![\w-])eyJ[\w-]{8,4000}\.eyJ[\w-]{8,4000}\.[\w-]*", re.ASCII),
    "a Stripe key": re.compile(r"\b[rs]k_live_[0-9A-Za-z]{20,}"),
    "a SendGrid key": re.compile(r"\bSG\.[0-9A-Za-z_-]{22}\.[0-9A-Za-z_-]{43}"),
    "a package registry's token": re.compile(r"\b(npm_[0-9A-Za-z]{36}|pypi-AgE[0-9A-Za-z_-]{50,})"),
    "a bearer token": re.compile(r"(?i)\bbearer\s+[0-9A-Za-z._~+/-]{20,}"),
    "a webhook's address": re.compile(
        r"https://(hooks\.slack\.com/(services|workflows|triggers)/|discord(app)?\.com/api/webhooks/"
        r"|[\w.-]+\.webhook\.office\.com/|chat\.googleapis\.com/v1/spaces/[^/\s]+/messages\?)[^\s\"']"
    ),
    "a password in an address": re.compile(
        r"(?<![a-z0-9+])[a-z][a-z0-9+]{0,20}://[^/\s:@{}$<]{0,99}:[^/\s:@{}$<]{1,999}@[\w.-]"
    ),
}

#: Names whose plain-text value is always a secret; and ambiguous names (a tokenizer's token, a kind of
#: authorization), whose value is a secret only if it looks like one.
_NAME = re.compile(
    r"(?i)(^|[_.-])(password|passwd|pwd|passphrase|secret|(secret|api|access|account|private)[_-]?key"
    r"|client[_-]?secret|(?-i:(?<=_)PASS|PGPASSWORD))$"
)
_WEAK_NAME = re.compile(r"(?i)(^|[_.-])(token|auth|authorization|bearer|credentials?|webhook([_-]?url)?)$")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}")
#: Values that are not secrets: a resource's name, a path, a placeholder, a tokenizer's token.
_REFERENCE = re.compile(r"(projects|secrets)/\S+|(gs:/)?/\S+|.*\{\{.*|\$\{?\w+\}?|\[\w+\]|<[\w/|]+>")

#: Assignments: of code or JSON, of a command line, of an environment, of a line in a settings file. A name is
#: bounded on its left; without that, a text without spaces takes quadratic time.
_ASSIGNMENTS = (
    re.compile(r"""(?<![\w-])([A-Za-z_][\w-]*)["']?\s{0,9}[=:]\s{0,9}["']([^"'\s]{8,})["']"""),
    re.compile(r"""(?:^|\s)--([a-z][\w-]*)[= ]["']?([^\s"'$(){}-][^\s"'$(){}]{7,})"""),
    re.compile(r"""(?:^|\s)([A-Z][A-Z0-9_]*)=["']?([^\s"'$(){}]{8,})"""),
    re.compile(
        r"(?m)(?<![\w.])([a-z]\w*)(?:[ \t]{0,9}=[ \t]{0,9}|:[ \t]{1,9})"
        r"(?=\S{0,99}\d)(?=\S{0,99}[A-Za-z])([\w+/=-]{16,})$"
    ),
)
#: Base64, and the end of a line inside of it, as a text or in JSON.
_BASE64 = re.compile(r"[0-9A-Za-z+/_-]{40,}")
_WRAP = re.compile(r"(?<=[0-9A-Za-z+/_-]{40})(?:\s|\\[rn]){1,9}(?=[0-9A-Za-z+/_-])")


def secret_kind(name: str, value: Any) -> str | None:
    """Returns the kind of secret that a named value holds at any depth, such as "a Slack token"; or None.

    Texts are searched for the key formats of many vendors, also in base64, and for assignments to names of
    secrets. A plain text with such a name always counts as a secret.
    """
    return next(_kinds(name, value), None)


def _kinds(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _in_text(str(key))
            yield from _kinds(str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _kinds(name, item)
    elif isinstance(value, str):
        yield from _in_text(value)
        assignments = (pattern.findall(value) for pattern in _ASSIGNMENTS)
        if any(
            _is_secret(*pair) for pair in ((name, value), *(pair for each in assignments for pair in each))
        ):
            yield "a secret, by its name"


def _in_text(text: str) -> Iterator[str]:
    yield from (kind for kind, pattern in _PATTERNS.items() if pattern.search(text))
    for encoded in _BASE64.findall(_WRAP.sub("", text)):
        for start in range(4):  # other letters may precede it
            yield from (f"{kind}, in base64" for kind in _in_text(_decoded(encoded[start:])))


def _is_secret(name: str, value: str) -> bool:
    text = value.strip()
    if not text or _REFERENCE.fullmatch(text):
        return False
    return bool(_NAME.search(name) or (_WEAK_NAME.search(name) and _RANDOM.fullmatch(text)))


def _decoded(text: str) -> str:
    """Returns the text that letters of either base64 alphabet encode; "" if it is not text."""
    plain = text.translate(str.maketrans("-_", "+/"))
    content = base64.b64decode(plain[: len(plain) // 4 * 4]).replace(b"\0", b"")  # UTF-16, too
    sample = content[:256]
    is_text = sum(byte < 0x80 for byte in sample) > 0.8 * len(sample)  # about half of random bytes are
    return content.decode("utf-8", "ignore") if is_text else ""


#: A location or a query: it stays the same when its data changes.
_LOCATION = re.compile(
    r"(?:[a-z]+:)?(?:gs|bq|s3|https?|hdfs)://|(?:[a-z]+:)?/gcs/"
    r"|(?is:\s*(?:--|(?:select|with|create|insert|merge)\b).*\bfrom\b)"
)
_TABLE = re.compile(r"[\w-]+[.:]\w+\.\w+")
#: Names of inputs that change when the data does.
_FINGERPRINT = re.compile(r"(^|[_-])(time|timestamp|date|day|version|fingerprint|digest|hash|run_id)([_-]|$)")
#: Names of inputs that are paths for writing, not for reading.
_WRITTEN = re.compile(
    r"(^|_)(out|output|outputs|dest|destination|target|root|staging|tmp|temp|log|logs|export)(_|$)"
)


@rules(Task)
def caching(task: Task) -> Found:
    """Caching of a task.

    SL513 warning: A cached task that reads a location has an input that changes with the data.
        Fix: call set_caching_options(False), or pass a fingerprint of the data
        Source: pipelines/configure-caching.
    """
    if not task.container or not mapping_at(task.spec, "cachingOptions").get("enableCache"):
        return
    if task.inputs("artifacts") or _may_change(task):
        return
    for name, value in task.values().items():
        if not isinstance(value, str) or _WRITTEN.search(name):
            continue
        if _LOCATION.match(value) or ("table" in name and _TABLE.fullmatch(value)):
            shown = truncate(" ".join(value.split()), 60)
            yield ("SL513", f"cached with {name} = {shown!r}: a later run on new data reuses the old result")
            return


def _may_change(task: Task) -> bool:
    """Whether an input is computed in the run, is the run's name or time, or a fingerprint."""
    return any(
        _FINGERPRINT.search(name)
        or (task.value(name) is UNKNOWN and not _is_passed_down(task, name))
        or re.search(r"\{\{\$\.pipeline_(job|task)_", str(task.value(name)))
        for name in task.inputs("parameters")
    )


def _is_passed_down(task: Task, name: str) -> bool:
    outer = mapping_at(task.inputs("parameters"), name).get("componentInputParameter")
    if not isinstance(outer, str):
        return False
    return _is_passed_down(task.parent, outer) if task.parent else True


#: kfp.dsl 2.17 and google_cloud_pipeline_components 2.22 (_placeholders.py).
_RUN = (
    "job_create_time_utc job_id job_name job_resource_name job_schedule_time_utc "
    "job_schedule_time_utc_placeholder job_uuid root task_id task_name task_uuid google_cloud_location "
    "google_cloud_project_id service_account network persistent_resource_id encryption_key_name"
)
_KEY = r"\['[^']+'\]"
_KNOWN = re.compile(
    r"(\.json_escape\[\d\])?"
    rf"|\.inputs\.parameters{_KEY}(\.json_escape\[\d\])?"
    rf"|\.inputs\.artifacts{_KEY}(\.(uri|path|value|name|type|metadata({_KEY})*))?(\.json_escape\[\d\])?"
    rf"|\.outputs\.parameters{_KEY}\.output_file"
    rf"|\.outputs\.artifacts{_KEY}(\.(uri|path|value|name|type|metadata({_KEY})*))?"
    r"|\.outputs\.output_file|\.outputs\.output_metadata_uri|\.outputMetadataUri|\.workspace_path"
    rf"|\.pipeline_({_RUN.replace(' ', '|')})(\.json_escape\[\d\])?"
)


@rules(Task)
def placeholders(task: Task) -> Found:
    """Placeholders.

    SL521 error: The platform fills in every placeholder, inside objects and lists with text.
        Fix: use a placeholder of kfp.dsl or google_cloud_pipeline_components, or an input of the component;
            let a component of your own put a whole object out
        Source: kfp.dsl 2.17; GCPC; pipeline_spec.proto.
    """
    into_job = JOB_PARAMETERS if not task.container or payload_of(task.container) else ()
    for name, item in task.inputs("parameters").items():
        value = mapping_at(item, "runtimeValue").get("constant")
        if isinstance(value, dict | list) and name not in into_job:
            for match in filter(None, map(PARAMETER.fullmatch, strings(value))):
                if task.kind(match[1]) not in ("", "STRING"):
                    yield (
                        "SL521",
                        f"in {name}, {match[1].removeprefix('pipelinechannel--')} would become text",
                    )
    for found in sorted({match[0] for text in _texts(task) for match in PLACEHOLDER.finditer(text)}):
        if not _KNOWN.fullmatch(found[3:-2]):
            yield "SL521", f"the platform does not fill in {found}"
    known = {*task.declared("parameters"), *task.inputs("parameters")}
    named = {match[1] for text in argv(task.container) for match in PARAMETER.finditer(text)}
    for name in sorted(named - known):
        component = f"component {task.component_name}"
        yield "SL521", f"a placeholder names the input {name!r}, which {component} does not have"


def _texts(task: Task) -> Iterator[str]:
    yield from argv(task.container)
    for item in list_at(task.container, "env"):
        yield str(item.get("value", ""))
    values: list[Any] = [mapping_at(item).get("runtimeValue") for item in task.inputs("parameters").values()]
    values += [mapping_at(item).get("defaultValue") for item in task.declared("parameters").values()]
    for value in values:
        if "{{$" in str(value):
            # Each text by itself: as one text, its quotes would be escaped.
            yield from strings(value)
