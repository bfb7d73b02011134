//! What a launcher sets for its ranks, in the variables of each process.
//!
//! [`LaunchedProcess`] is read before anything is connected: whether there is a launcher at all, which rank
//! this process is to be, and of how many. [`RendezvousConfig`](crate::rendezvous::RendezvousConfig) is what
//! the rendezvous needs beyond that.
//!
//! A known trap: a program that was linked with one MPI and started by another's launcher, or without a
//! launcher's plugin, does not fail. Every copy believes to be rank 0 of 1, and all do the same work. So what
//! a transport found is compared with what the launcher meant.

use crate::error::{Error, Result};

/// Variables that hold the number of ranks, the one that knows best first: `mpirun` inside a Slurm job may
/// well start fewer ranks than the job has tasks.
const SIZES: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];

/// Who started this process as one of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Launcher {
    /// `mpirun` or `mpiexec`: MPI connects the ranks.
    Mpi,
    /// Slurm's `srun`: MPI does, where Slurm has the plugin for it; or the job script says where rank 0 is.
    Slurm,
    /// `torchrun --no-python` or a shell that sets the same variables: they say where rank 0 is.
    Torchrun,
}

/// A launcher and its variables: how many ranks there are, which of them this one is, and how many of them the
/// machine has, where the launcher sets that.
type LauncherVariables = (Launcher, &'static str, &'static str, Option<&'static str>);

/// The one that knows best first, as for [`SIZES`]; torchrun inside a Slurm job was started by Slurm, not the
/// other way round.
const LAUNCHERS: [LauncherVariables; 4] = [
    (Launcher::Mpi, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", Some("OMPI_COMM_WORLD_LOCAL_SIZE")),
    (Launcher::Mpi, "PMI_SIZE", "PMI_RANK", Some("MPI_LOCALNRANKS")),
    (Launcher::Torchrun, "WORLD_SIZE", "RANK", Some("LOCAL_WORLD_SIZE")),
    // Not SLURM_NTASKS: a job script has it too, of which there is one.
    (Launcher::Slurm, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", None),
];

/// One of several processes that a launcher has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedProcess {
    /// The program that has started the processes.
    pub launcher: Launcher,
    /// Its number in the world.
    pub rank: usize,
    /// How many there are; at least two.
    pub size: usize,
    /// How many of them share this machine, where the launcher says so.
    pub local_size: Option<usize>,
    /// The variable that holds `size`, for messages.
    pub variable: &'static str,
}

impl LaunchedProcess {
    /// From the variables of this process; `None` where it is the only one.
    pub fn from_environment() -> Result<Option<LaunchedProcess>> {
        LaunchedProcess::from_variables(|name| std::env::var(name).ok())
    }

    /// From variables that `variable` looks up.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchedProcess>> {
        let found = LAUNCHERS.into_iter().find(|(_, of_size, ..)| variable(of_size).is_some());
        let Some((launcher, of_size, of_rank, of_local_size)) = found else { return Ok(None) };
        let number = |name: &str| {
            let Some(value) = variable(name) else {
                let what = format!("{of_size} is set but {name} is not, which says which rank this is");
                return Err(Error::Variables { what });
            };
            let wrong = || format!("{name} must be a whole number, got `{value}`");
            value.trim().parse().map_err(|_| Error::Variables { what: wrong() })
        };
        let size: usize = number(of_size)?;
        if size == 0 {
            let what = format!("{of_size} is 0, but this process is a rank: there is at least 1");
            return Err(Error::Variables { what });
        }
        if size < 2 {
            return Ok(None);
        }
        let rank = number(of_rank)?;
        if rank >= size {
            let what = format!("{of_rank} is {rank}, but {of_size} is {size}: ranks are numbered from 0");
            return Err(Error::Variables { what });
        }
        let local_size = of_local_size.and_then(|name| number(name).ok());
        Ok(Some(LaunchedProcess { launcher, rank, size, local_size, variable: of_size }))
    }
}

/// Checks that `found` ranks are as many as the launcher started. `variable` looks a variable up.
pub fn check_size(found: usize, variable: impl Fn(&str) -> Option<String>) -> Result<()> {
    let named = SIZES.into_iter().find_map(|name| Some((name, variable(name)?)));
    let Some((name, value)) = named else { return Ok(()) };
    let trimmed = value.trim();
    if trimmed.parse() == Ok(found) {
        return Ok(());
    }
    let what = if found == 1 {
        format!(
            "the launcher started {trimmed} ranks ({name}={trimmed}), but this one sees only itself; start it with the \
             launcher of the MPI that it is linked with (or with srun --mpi=pmix or --mpi=pmi2)"
        )
    } else {
        format!("the launcher started {trimmed} ranks ({name}={trimmed}), but MPI connected {found}")
    };
    Err(Error::Variables { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(found: usize, variables: &[(&str, &str)]) -> Result<(), String> {
        let variable = |name: &str| Some(variables.iter().find(|(n, _)| *n == name)?.1.to_owned());
        check_size(found, variable).map_err(|e| e.to_string())
    }

    fn launched(variables: &[(&str, &str)]) -> Result<Option<LaunchedProcess>, String> {
        let variable = |name: &str| Some(variables.iter().find(|(n, _)| *n == name)?.1.to_owned());
        LaunchedProcess::from_variables(variable).map_err(|e| e.to_string())
    }

    #[test]
    fn every_launcher_is_known_by_its_variables() {
        let cases = [
            (Launcher::Mpi, ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
            (Launcher::Mpi, ["PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"]),
            (Launcher::Torchrun, ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"]),
        ];
        for (launcher, [size, rank, local]) in cases {
            let found = launched(&[(size, "8"), (rank, "3"), (local, "4")]).unwrap().unwrap();
            let expected =
                LaunchedProcess { launcher, rank: 3, size: 8, local_size: Some(4), variable: size };
            assert_eq!(found, expected);
        }
        let slurm =
            [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1"), ("WORLD_SIZE", "16"), ("RANK", "9")];
        assert_eq!(launched(&slurm[..2]).unwrap().unwrap().launcher, Launcher::Slurm);
        assert_eq!(launched(&slurm).unwrap().unwrap().rank, 9, "torchrun on every node of a job");
    }

    #[test]
    fn one_process_is_alone_whoever_started_it() {
        assert_eq!(launched(&[]), Ok(None));
        assert_eq!(launched(&[("WORLD_SIZE", "1"), ("RANK", "0")]), Ok(None));
        assert_eq!(launched(&[("OMPI_COMM_WORLD_SIZE", "1")]), Ok(None));
        assert_eq!(launched(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), Ok(None), "a job script");
    }

    #[test]
    fn variables_that_make_no_rank_are_named() {
        let message_of = |variables: &[(&str, &str)]| launched(variables).unwrap_err();
        assert_eq!(
            message_of(&[("WORLD_SIZE", "4")]),
            "WORLD_SIZE is set but RANK is not, which says which rank this is"
        );
        assert_eq!(
            message_of(&[("OMPI_COMM_WORLD_SIZE", "0"), ("OMPI_COMM_WORLD_RANK", "0")]),
            "OMPI_COMM_WORLD_SIZE is 0, but this process is a rank: there is at least 1"
        );
        assert_eq!(message_of(&[("WORLD_SIZE", "x")]), "WORLD_SIZE must be a whole number, got `x`");
        assert_eq!(
            message_of(&[("PMI_SIZE", "4"), ("PMI_RANK", "4")]),
            "PMI_RANK is 4, but PMI_SIZE is 4: ranks are numbered from 0"
        );
    }

    #[test]
    fn sizes_that_agree_pass() {
        assert_eq!(check(1, &[]), Ok(()));
        assert_eq!(check(4, &[("PMI_SIZE", "4")]), Ok(()));
        assert_eq!(check(2, &[("OMPI_COMM_WORLD_SIZE", "2"), ("SLURM_NTASKS", "8")]), Ok(()));
    }

    #[test]
    fn copies_of_rank_0_are_noticed() {
        assert_eq!(
            check(1, &[("PMI_SIZE", "4")]).unwrap_err(),
            "the launcher started 4 ranks (PMI_SIZE=4), but this one sees only itself; start it with the launcher of \
             the MPI that it is linked with (or with srun --mpi=pmix or --mpi=pmi2)"
        );
        assert!(check(1, &[("SLURM_NTASKS", "8")]).unwrap_err().contains("SLURM_NTASKS=8"));
        assert_eq!(
            check(3, &[("OMPI_COMM_WORLD_SIZE", "4")]).unwrap_err(),
            "the launcher started 4 ranks (OMPI_COMM_WORLD_SIZE=4), but MPI connected 3"
        );
    }
}
