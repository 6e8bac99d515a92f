"""Secrets are found in plain texts, in whatever form; what only sounds like one is let through."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.check import Pipeline, check_pipeline, check_run
from shardline.pipelines.check.container_rules import secret_kind
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.base.errors import PipelineError
from tests.helpers.checks import pipeline

# Put together here, so that no scanner of this repository takes them for real ones.
ACCOUNT = json.dumps({"type": "service_account", "private_key": "-----BEGIN " + "PRIVATE KEY-----\nMII"})
TOKEN = (
    "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
)
SLACK = "https://hooks.slack.com/" + "services/T0/B0/x"
AWS = "AKIA" + 16 * "A"

SECRETS: list[tuple[str, str, Any]] = [
    ("a private key", "key", ACCOUNT),
    ("a private key, in base64", "key", base64.b64encode(ACCOUNT.encode()).decode()),
    ("a private key, in base64", "key", base64.urlsafe_b64encode(f"é{ACCOUNT}".encode()).decode()),
    ("a private key, in base64", "key", base64.encodebytes(f"{ACCOUNT}{ACCOUNT}".encode()).decode()),
    ("a private key, in base64", "key", json.dumps(base64.encodebytes(ACCOUNT.encode()).decode())),
    ("a private key, in base64", "key", f"ab{base64.b64encode(ACCOUNT.encode()).decode()}"),
    ("a private key, in base64", "key", base64.b64encode(ACCOUNT.encode("utf-16-le")).decode()),
    ("a GitHub token", "accounts", {"ghp_" + 36 * "a": "mine"}),
    ("a JSON Web Token", "note", TOKEN),
    ("a bearer token", "header", "Authorization: Bearer " + 24 * "x"),
    ("a Google API key", "text", "AIza" + 35 * "a"),
    ("a Google OAuth token", "text", "ya29." + 30 * "a"),
    ("a Google OAuth client secret", "text", "GOCSPX-" + 28 * "a"),
    ("an AWS access key", "text", "AKIA" + 16 * "A"),
    ("an Azure account key", "text", "AccountKey=" + 86 * "a" + "=="),
    ("a GitHub token", "text", "ghp_" + 36 * "a"),
    ("a GitLab token", "text", "glpat-" + 20 * "a"),
    ("a Slack token", "text", "xoxb-" + 20 * "1"),
    ("a Hugging Face token", "text", "hf_" + 34 * "a"),
    ("an OpenAI or Anthropic key", "text", "sk-ant-api03-" + 15 * "aB3"),
    ("a Stripe key", "text", "sk_live_" + 24 * "a"),
    ("a SendGrid key", "text", "SG." + 22 * "a" + "." + 43 * "b"),
    ("a package registry's token", "text", "npm_" + 36 * "a"),
    ("a webhook's address", "webhook_secret", SLACK),
    ("a webhook's address", "url", "https://discord.com/api/" + "webhooks/1/x"),
    ("a webhook's address", "url", "https://acme.webhook.office.com/" + "webhookb2/x"),
    ("a password in an address", "url", "postgres://user:hunter2@db/x"),
    ("a secret, by its name", "TOKEN", "f3b1c2d4"),
    ("a secret, by its name", "CLIENT_SECRET", "f3b1"),
    ("a secret, by its name", "wandb-api-key", "f3b1"),
    ("a secret, by its name", "DB_PASS", "correct horse"),
    ("a secret, by its name", "PGPASSWORD", "hunter2"),
    ("a secret, by its name", "train_options", {"hparams": {"layers": [{"password": "hunter2"}]}}),
    ("a secret, by its name", "command", "python x.py --api-key f3b1c2d4"),
    ("a secret, by its name", "command", "export HF_TOKEN=f3b1c2d4"),
    ("a secret, by its name", "source", "client_secret = 'f3b1c2d4'"),
    ("a secret, by its name", "ini", "[default]\naws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRf\n"),
]


@pytest.mark.parametrize(("kind", "name", "value"), SECRETS)
def test_a_secret_is_found(kind: str, name: str, value: Any) -> None:
    assert secret_kind(name, value) == kind


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer", "bpe-32000"),
        ("cls_token", "[CLS]"),
        ("eos_token", "<|endoftext|>"),
        ("pad_token", "pad"),
        ("bos_token", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"),
        ("auth", "none"),
        ("token", "HF_TOKEN"),
        ("model", "models.token:build_transformer_v2"),
        ("source", "token:LoadDataset2024Version"),
        ("webhook_secret", "projects/p/secrets/hook/versions/latest"),
        ("API_KEY_FILE", "/run/secrets/key"),
        ("credentials", "gs://bucket/key.json"),
        ("TOKEN", "{{$.inputs.parameters['token']}}"),
        ("TOKEN", "$TOKEN"),
        ("password", ""),
        ("PASS", "validation"),
        ("multi_pass", "validation"),
        ("source", "token = settings.token_of(name); api_key: str = load_api_key()"),
        ("image", "europe-docker.pkg.dev/p/r/i@sha256:" + 64 * "a"),
        ("rules", ["accuracy >= champion - 0.005"]),
        ("image", "sk-learn-pipeline-of-the-flowers-team-version-2"),
        ("max_tokens", 512),
        ("data", base64.b64encode(b"plain text of some length, in base64, that says nothing" * 2).decode()),
    ],
)
def test_what_only_sounds_like_one_is_let_through(name: str, value: Any) -> None:
    assert secret_kind(name, value) is None


def test_no_run_begins_with_a_secret_among_its_parameters() -> None:
    spec = pipeline(parameters={"webhook_secret": "STRING", "options": "STRUCT"})
    for name, value in {"webhook_secret": SLACK, "options": {"hparams": {"api_key": "hunter2"}}}.items():
        with pytest.raises(PipelineError, match=f"SL811 parameter {name}: {name} holds a") as caught:
            check_run(spec, {"webhook_secret": "", "options": {}, name: value})
        assert "hunter2" not in str(caught.value)
        assert SLACK not in str(caught.value)

    own = load_pipeline(Path(__file__).parents[2] / "compiled" / "retrain.yaml")
    for name in ("model", "epochs", "source"):
        with pytest.raises(PipelineError, match=f"SL811 parameter {name}: {name} holds an AWS") as caught:
            check_run(own, {name: AWS})
        assert AWS not in str(caught.value) + str(check_pipeline(Pipeline(own, {name: AWS})))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    ["a", "a+", "a=", 'a="', "a:", "--a ", "A=", "eyJ", "eyJ-", "a://", "ab/=1", "token = a1", "sk-", " "],
)
def test_a_long_text_is_searched_in_no_time(piece: str) -> None:
    assert secret_kind("text", piece * (200_000 // len(piece))) is None
