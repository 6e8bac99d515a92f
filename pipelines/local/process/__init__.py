"""Processes on this machine: started, forked, isolated, and stopped without leaving an orphan.

What happens after SIGTERM: `shardline run` ends its executing process, which asks all of its descendants to
end, and kills what is left after GRACE_S (`stop_descendants`). In a task that runs a job, the signal raises
`Stopped`: the job asks its replicas to end, and kills them after GRACE_S (`run_job`). When a process has
ended, or its client has died, its guardian kills all that it has started.

It may import nothing else of `local` but `kfp_internals`. `fork_server` and `guardian` are programs.
"""

from shardline.pipelines.local.process.guardian import exit_with_parent as exit_with_parent
from shardline.pipelines.local.process.network import NO_NETWORK as NO_NETWORK
from shardline.pipelines.local.process.network import REMEDY as REMEDY
from shardline.pipelines.local.process.network import UNREACHABLE as UNREACHABLE
from shardline.pipelines.local.process.network import isolation_unavailable as isolation_unavailable
from shardline.pipelines.local.process.network import job_network as job_network
from shardline.pipelines.local.process.processes import GRACE_S as GRACE_S
from shardline.pipelines.local.process.processes import GuardedProcess as GuardedProcess
from shardline.pipelines.local.process.processes import Launch as Launch
from shardline.pipelines.local.process.processes import ProcessFailedError as ProcessFailedError
from shardline.pipelines.local.process.processes import Stopped as Stopped
from shardline.pipelines.local.process.processes import adopted_orphans as adopted_orphans
from shardline.pipelines.local.process.processes import child_environment as child_environment
from shardline.pipelines.local.process.processes import describe_exit as describe_exit
from shardline.pipelines.local.process.processes import fork_server_of_job as fork_server_of_job
from shardline.pipelines.local.process.processes import forkable_program as forkable_program
from shardline.pipelines.local.process.processes import ignore_stop_signals as ignore_stop_signals
from shardline.pipelines.local.process.processes import scratch_as_tempdir as scratch_as_tempdir
from shardline.pipelines.local.process.processes import scratch_directory as scratch_directory
from shardline.pipelines.local.process.processes import signal_name as signal_name
from shardline.pipelines.local.process.processes import start_fork_server as start_fork_server
from shardline.pipelines.local.process.processes import stop_descendants as stop_descendants
from shardline.pipelines.local.process.processes import stop_on_signals as stop_on_signals
