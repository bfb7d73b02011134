//! `espalier train` under a launcher's variables: never several copies of rank 0, and one sentence where
//! ranks cannot be joined. What happens where they can is in `mpi`.

use std::process::Output;

use crate::{TestDir, command, refused, succeeded};

/// Runs with a launcher's variables.
fn launched(variables: &[(&str, &str)], arguments: &str) -> Output {
    let folder = TestDir::with_run_file();
    let output = command(&folder, arguments).envs(variables.iter().copied()).output().unwrap();
    let left: Vec<_> = std::fs::read_dir(&folder).unwrap().collect();
    assert!(left.len() == 1 || output.status.success(), "nothing is left behind: {left:?}");
    output
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_program_without_mpi_does_not_train_beside_its_copies() {
    let launchers = [
        ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"],
        ["PMI_SIZE", "PMI_RANK"],
        ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"],
    ];
    for [size, rank] in launchers {
        for (number, who) in [("0", ""), ("1", "rank 1: ")] {
            let text = refused(launched(&[(size, "4"), (rank, number)], ""), &[]);
            let expected = format!(
                "error: {who}the launcher started 4 processes ({size}=4), but this program was built without MPI: build it \
                 with `cargo build --release --features mpi`, or start one process with --ranks 4\n"
            );
            assert_eq!(text, expected);
        }
    }
}

#[test]
fn torchrun_joins_gpus_only() {
    let two = [("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")];
    refused(launched(&two[..2], ""), &["WORLD_SIZE=2", "mpirun", "--ranks 2"]);
    let text = refused(launched(&two, "--set device.kind=cuda"), &[]);
    assert!(text.starts_with("error: MASTER_ADDR is not set"), "{text}");
}

#[test]
fn variables_that_contradict_the_run_file_or_themselves_are_named() {
    let mpirun = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "0")];
    assert_eq!(
        refused(launched(&mpirun, "--ranks 2"), &[]),
        "error: `parallel`: the mesh of data 2 takes 2 ranks, but 4 were started; start 2, or set `data` to 4\n"
    );
    let text = refused(launched(&[("WORLD_SIZE", "4")], ""), &[]);
    assert_eq!(text, "error: WORLD_SIZE is set but RANK is not, which says which rank this is\n");
}

/// Launchers of one process, and a Slurm job's own script, are no reason to join anybody.
#[test]
fn one_process_trains_by_itself_whoever_started_it() {
    for variables in [
        [("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")],
        [("WORLD_SIZE", "1"), ("RANK", "0")],
        [("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")],
    ] {
        succeeded(launched(&variables, ""));
    }
}
