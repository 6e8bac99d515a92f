"""Vertex ML Metadata: contexts, which experiments and runs of pipelines are.

Source: MetadataService in google.cloud.aiplatform_v1, and how google.cloud.aiplatform uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from google.cloud.aiplatform_v1.types import Context, MetadataStore, PipelineJob, metadata_service
from google.rpc import code_pb2

from tests.contract.fake.api import PROJECT, PROJECT_NUMBER, ApiError, find, now, refuse

_STORE = re.compile(rf"projects/({PROJECT}|{PROJECT_NUMBER})/locations/[a-z0-9-]+/metadataStores/default")
#: CreateContextRequest.context_id.
_ID = re.compile(r"[a-z0-9-]{4,128}")
_SCHEMAS = {"system.Experiment", "system.ExperimentRun", "system.Pipeline", "system.PipelineRun"}


class Contexts:
    """Answers the calls of MetadataService.

    Attributes:
        contexts: Contexts by name.
        makes_runs: Whether runs of pipelines get a context.
    """

    def __init__(self) -> None:
        self.contexts: dict[str, Context] = {}
        self.makes_runs = True
        self._jobs: dict[str, PipelineJob] = {}

    def run_began(self, job: PipelineJob) -> None:
        """Makes the context of a run, as the platform does some time after the run's creation."""
        if self.makes_runs:
            parent, _, own = job.name.partition("/pipelineJobs/")
            context = Context(
                name=f"{parent}/metadataStores/default/contexts/{own}",
                display_name=own,
                schema_title="system.PipelineRun",
                schema_version="0.0.1",
            )
            self.contexts[context.name] = job.job_detail.pipeline_run_context = context
            self._jobs[context.name] = job

    def get_metadata_store(self, request: metadata_service.GetMetadataStoreRequest) -> MetadataStore:
        return MetadataStore(name=_numbered(request.name))

    def create_context(self, request: metadata_service.CreateContextRequest) -> Context:
        parent = _numbered(request.parent)
        if not _ID.fullmatch(request.context_id):
            refuse(f"context_id: {request.context_id!r}")
        if request.context.schema_title not in _SCHEMAS or request.context.schema_version != "0.0.1":
            refuse(f"no such schema: {request.context.schema_title} {request.context.schema_version}")
        context = Context(request.context)
        context.name, context.create_time = f"{parent}/contexts/{request.context_id}", now()
        if context.name in self.contexts:
            raise ApiError(code_pb2.ALREADY_EXISTS, f"Context {context.name} already exists.")
        self.contexts[context.name] = context
        return context

    def get_context(self, request: metadata_service.GetContextRequest) -> Context:
        store, _, own = request.name.partition("/contexts/")
        return find(self.contexts, f"{_numbered(store)}/contexts/{own}")

    def add_context_children(self, request: metadata_service.AddContextChildrenRequest) -> Any:
        parent = find(self.contexts, request.context)
        for name in request.child_contexts:
            child = find(self.contexts, name)
            if parent.name not in child.parent_contexts:
                child.parent_contexts.append(parent.name)
            if job := self._jobs.get(child.name):
                job.job_detail.pipeline_run_context = child
        return metadata_service.AddContextChildrenResponse()

    def children(self, own: str) -> Mapping[str, Context]:
        """Returns the children of the context with this id, by their ids."""
        return {
            name.rpartition("/")[2]: context
            for name, context in self.contexts.items()
            if any(parent.endswith(f"/contexts/{own}") for parent in context.parent_contexts)
        }


def _numbered(store: str) -> str:
    if not _STORE.fullmatch(store):
        raise ApiError(code_pb2.NOT_FOUND, f"MetadataStore {store} not found.")
    return store.replace(f"projects/{PROJECT}/", f"projects/{PROJECT_NUMBER}/")
