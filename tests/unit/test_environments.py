"""Clusters by the variables of Slurm and other launchers: what is found, and errors for what is malformed."""

import json

import pytest

from shardline.trainer.base.errors import ClusterError
from shardline.trainer.cluster import expand_hosts, read_cluster, slurm, without_proxy


def addresses(names):
    return {name: f"10.0.0.{name.lstrip('abn')}" for name in names}


def step(rank=0, nodes="n[1-2]", counts="2,1", size=3, **more):
    """Variables that srun of Slurm 22.05 sets in a task."""
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_PROCID": str(rank),
        **more,
    }


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        (step(), "1:10768 1:10769 2:10768"),
        (step(1, SLURMD_NODENAME="n2", SLURM_DISTRIBUTION="cyclic"), "1:10768 2:10768 1:10769"),
        (step(2, "n[2-3],n1", "1(x3)"), "2:10768 3:10768 1:10768"),
    ],
)
def test_a_step_of_slurm_has_an_address_for_each_task(variables, hosts):
    found = slurm(variables, addresses)

    assert found.hosts == tuple(f"10.0.0.{host}" for host in hosts.split())
    assert found.task_index == int(variables["SLURM_PROCID"])


def test_nodes_that_are_one_machine_share_its_ports():
    found = slurm(step(), lambda names: dict.fromkeys(names, "10.0.0.1"))

    assert found.hosts == ("10.0.0.1:10768", "10.0.0.1:10769", "10.0.0.1:10770")


def test_a_step_on_one_node_is_a_cluster_on_loopback():
    found = read_cluster(step(1, "n1", "2", 2))

    assert (found.name, found.hosts) == ("worker-1", ("127.0.0.1:10768", "127.0.0.1:10769"))
    assert (found.role, found.origin) == ("worker", "Slurm job 12, 2 tasks on n1")
    assert read_cluster(step(0, "n1", "2", 2)).is_chief


def mpi(rank, size, local, hosts=""):
    """Variables that mpirun of Open MPI 4.1 sets."""
    counts = {"RANK": rank, "SIZE": size, "LOCAL_SIZE": local}
    variables = {f"OMPI_COMM_WORLD_{name}": str(count) for name, count in counts.items()}
    return {**variables, "PMIX_NAMESPACE": "646184961", "SHARDLINE_HOSTS": hosts}


SBATCH = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}
TWO_POOLS = '{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}}'
ONE_REPLICA = '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": 0}}'


@pytest.mark.parametrize(
    "variables",
    [
        {},
        step(0, "n1", "1", 1),
        {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # the script of sbatch
        {**step(0, "n1", "1", 1), "SLURM_NTASKS": "4"},  # a step of one task in an allocation for four
        {**step(0, "n1", "1", 1), "PMIX_RANK": "0", "WORLD_SIZE": "1"},  # srun --mpi=pmix
        {**step(), "CLUSTER_SPEC": "{}"},  # the only replica of a job
        # as `launch` starts it, whatever is around it
        {**SBATCH, "WORLD_SIZE": "4", "CLUSTER_SPEC": ONE_REPLICA},
        {**SBATCH, "SHARDLINE_HOSTS": "localhost"},
        {**mpi(0, 1, 1), **SBATCH},  # mpirun -n 1 in an allocation for three
        {**SBATCH, "WORLD_SIZE": "1"},
        {**step(), "RAY_JOB_ID": "1"},  # a task of Ray, whose nodes are tasks of Slurm, or replicas of a job
        {"CLUSTER_SPEC": TWO_POOLS, "RAY_JOB_ID": "1"},
        {"SHARDLINE_HOSTS": "n1"},
        {"RANK": "3"},  # of anything
        {"WORLD_SIZE": "large"},
        {**step(), "SHARDLINE_HOSTS": "localhost"},  # tasks that are asked to train alone
        {"JOB_COMPLETION_INDEX": "0", "SHARDLINE_HOSTS": "localhost"},
        {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "t-0", "SHARDLINE_HOSTS": "t-0.t"},
        mpi(0, 1, 1),
    ],
)
def test_one_task_is_one_process(variables):
    assert str(read_cluster(variables)) == "one process"


def test_jobs_and_steps_do_not_meet():
    """Two jobs on the same nodes, and two steps of one."""
    ids = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": str(number)} for job in ("12", "13") for number in range(4)]
    hosts = [host for more in ids for host in slurm(step(**more), addresses).hosts]

    assert len(set(hosts)) == len(hosts)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (step(3), "SLURM_PROCID is '3', which is not a number from 0 to 2"),
        (step(-1), "SLURM_PROCID is '-1'"),
        (step(size=""), "SLURM_STEP_NUM_TASKS is ''"),
        (step(nodes=""), "SLURM_STEP_NODELIST is '', which is no list of hosts"),
        (step(nodes="n[1-"), "no list of hosts"),
        (step(nodes="n[1-99999999]"), "more than 65536"),
        (step(nodes="n[0-65535][0-65535]"), "more than 65536"),
        (step(nodes="n" + "[0-9]" * 400), "more than 65536"),
        (step(nodes=",".join(["n[1-40000]"] * 1000)), "more than 65536"),
        (step(counts="1(x999999)" + ",1(x999999)" * 10000), "no list of numbers"),
        (
            step(size=999999999, nodes="n1", counts="999999"),
            "SLURM_STEP_NUM_TASKS is '999999999', which is not",
        ),
        (step(counts="2,x"), "no list of numbers"),
        (step(counts="2,2"), "which is not SLURM_STEP_NUM_TASKS 3 on SLURM_STEP_NODELIST"),
        (step(counts="3"), "which is not"),
        (step(SLURM_LOCALID="1"), "task 0 of 3 is on '' as its task '1'"),
        (step(1, SLURMD_NODENAME="n2", SLURM_DISTRIBUTION="arbitrary"), "srun -m block"),
    ],
)
def test_names_what_is_malformed(variables, message):
    with pytest.raises(ClusterError, match=message):
        slurm(variables, addresses)


POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "t-1", "SHARDLINE_HOSTS": "t-[0-2].t"}


LEFTOVER, PAIR = (
    {"TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 0}})}
    for hosts in (["a:1"], ["a:1", "b:1"])
)


def torch(size):
    """Variables that torchrun sets."""
    return {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "name", "hosts", "origin"),
    [
        (POD, "worker-1", ["t-0.t", "t-1.t", "t-2.t"], "Kubernetes, 3 tasks on t-0.t, t-1.t, t-2.t"),
        ({**POD, "HOSTNAME": "j-c-0-0", "SHARDLINE_HOSTS": "j-c-0-0.j,j-w-[0-1]-[0-1].j"}, "worker-0",
         ["j-c-0-0.j", "j-w-0-0.j", "j-w-0-1.j", "j-w-1-0.j", "j-w-1-1.j"],
         "Kubernetes, 5 tasks on j-c-0-0.j, j-w-0-0.j, j-w-0-1.j, j-w-1-0.j and 1 more"),
        (mpi(1, 2, 2), "worker-1", ["127.0.0.1"] * 2, "Open MPI, 2 tasks on 127.0.0.1"),
        (mpi(2, 3, 1, "a,a,b"), "worker-2", ["a", "a", "b"], "Open MPI, 3 tasks on a, b"),
        # mpirun has started its daemons as a step of Slurm
        ({**mpi(1, 2, 2), **step(0)}, "worker-1", ["127.0.0.1"] * 2, "Open MPI, 2 tasks on 127.0.0.1"),
        # on the node of an allocation for more, and as scripts set it for each task of a step
        ({**mpi(1, 2, 2), **SBATCH}, "worker-1", ["127.0.0.1"] * 2, "Open MPI, 2 tasks on 127.0.0.1"),
        ({**torch(2), **step(1, "n1", "2", 2)}, "worker-1", ["127.0.0.1"] * 2,
         "Slurm job 12, 2 tasks on n1"),
    ],
)  # fmt: skip
def test_other_launchers(variables, name, hosts, origin):
    found = read_cluster(variables)

    assert (found.name, found.origin) == (name, origin)
    assert [host.rpartition(":")[0] for host in found.hosts] == hosts
    assert len(set(found.hosts)) == len(hosts)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is set, but where the others are is not known"),
        ({**POD, "HOSTNAME": "node7"}, "once, also this one's, HOSTNAME 'node7'"),
        ({**POD, "SHARDLINE_HOSTS": "t-1.t,t-1.t"}, "every pod once"),
        (mpi(0, 4, 2), "SIZE is 4: one task of Open MPI, but where .* such as 'n1,n1,n2'"),
        (mpi(0, 4, 2, "a,a,b"), "not the host of each of 4 ranks"),
        (mpi(0, 4, 2, "a,b,b,b"), "with 2 of them on the host of rank 0"),
        (mpi(4, 4, 2, "a,a,b,b"), "RANK is '4'"),
        (torch(4), "WORLD_SIZE is '4', so there are several tasks"),
        (SBATCH, "SLURM_NTASKS is '3', .*; start the program with srun, or set SHARDLINE_HOSTS=localhost"),
        ({"SHARDLINE_HOSTS": "n[1-2]"}, "HOSTS is 'n.1-2.', .* is not known; set TF_CONFIG for each task"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is '2'"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK is '1'"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE is '2'"),  # MPICH, Intel MPI
        ({"PMIX_RANK": "0"}, "PMIX_RANK is '0'"),  # which tells no number
        ({"CLUSTER_SPEC": TWO_POOLS}, "TF_CONFIG, with the"),
        ({**SBATCH, "TF_CONFIG": "{}"}, "SLURM_NTASKS"),  # none, as in TensorFlow
        # a TF_CONFIG of one host, left over in an image
        ({**LEFTOVER, **SBATCH}, "SLURM_NTASKS is '3', so there are several tasks, but TF_CONFIG has 1"),
        ({**LEFTOVER, **step()}, "SLURM_STEP_NUM_TASKS is '3', .* but TF_CONFIG has 1"),
        ({**LEFTOVER, **torch(2)}, "WORLD_SIZE is '2', .* but TF_CONFIG has 1"),
        ({**LEFTOVER, "JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX is '1', .* but TF_CONFIG has 1"),
        # torchrun inside the tasks of srun or mpirun, and another number of tasks than TF_CONFIG has
        (
            {**torch(4), **step(0, "n1", "2", 2)},
            "disagree: Slurm job 12, 2 tasks on n1, but WORLD_SIZE is '4'",
        ),
        (
            {**mpi(0, 2, 2), **torch(4)},
            "two launchers disagree: Open MPI, 2 tasks on .*, but WORLD_SIZE is '4'",
        ),
        ({**PAIR, **step()}, "two launchers disagree: TF_CONFIG has 2, but SLURM_STEP_NUM_TASKS is '3'"),
        ({**PAIR, "SHARDLINE_HOSTS": "n[1-4]"}, "TF_CONFIG has 2, but SHARDLINE_HOSTS is"),
    ],
)
def test_several_tasks_without_their_hosts_are_refused(variables, message):
    with pytest.raises(ClusterError, match=message):
        read_cluster(variables)


@pytest.mark.parametrize(
    "variables",
    [
        PAIR,
        {**PAIR, **step(0, "n1", "2", 2)},  # made from Slurm's variables
        {**PAIR, **SBATCH},  # by a script that starts its own processes
        {**PAIR, **step(), "RAY_JOB_ID": "1"},  # Ray, whose nodes are tasks of Slurm
        {**PAIR, **step(), "CLUSTER_SPEC": ONE_REPLICA},  # `launch` in a task of Slurm
        {**PAIR, "WORLD_SIZE": "2", "RANK": "0"},
    ],
)
def test_tf_config_stands_where_launchers_agree_or_are_outside(variables):
    assert read_cluster(variables).hosts == ("a:1", "b:1")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-3,07-09],m1", "n1 n2 n3 n07 n08 n09 m1"),
        ("r[1-2]n[08-10]", "r1n08 r1n09 r1n10 r2n08 r2n09 r2n10"),
        ("gpu-a.cluster,gpu[5]-ib", "gpu-a.cluster gpu5-ib"),
    ],
)
def test_lists_of_hosts(text, hosts):
    """As `scontrol show hostnames`."""
    assert expand_hosts({"L": text}, "L") == hosts.split()


@pytest.mark.parametrize(
    ("variables", "reached"),
    [
        ({}, "a,::1"),
        ({"no_proxy": "a,.corp"}, "a,.corp,::1"),  # what gRPC reads where there is no variable of its own
        ({"no_proxy": "b", "no_grpc_proxy": "c"}, "c,a,::1"),
        ({"no_grpc_proxy": "", "NO_PROXY": "b"}, "a,::1"),  # gRPC does not read upper case
    ],
)
def test_grpc_reaches_replicas_without_a_proxy_and_other_hosts_as_before(variables, reached):
    assert without_proxy(variables, ["a:1", "a:2", "[::1]:3"]) == {"no_grpc_proxy": reached}
