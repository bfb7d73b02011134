//! What a launcher says of its ranks, in the variables that it sets for each process.
//!
//! A known trap: a program that was linked with one MPI and started by another's launcher, or without a launcher's plugin,
//! does not fail. Every copy believes to be rank 0 of 1, and all do the same work. So what a transport found is held
//! against what the launcher meant.

use crate::error::{Error, Result};

/// Variables that hold the number of ranks, the one that knows best first: `mpirun` inside a Slurm job may well start
/// fewer ranks than the job has tasks.
const SIZES: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];

/// Checks that `found` ranks are as many as the launcher started. `variable` looks a variable up.
pub fn check_size(found: usize, variable: impl Fn(&str) -> Option<String>) -> Result<()> {
    let said = SIZES.into_iter().find_map(|name| Some((name, variable(name)?)));
    let Some((name, value)) = said else { return Ok(()) };
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
    Err(Error::Launch { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(found: usize, variables: &[(&str, &str)]) -> Result<(), String> {
        let variable = |name: &str| Some(variables.iter().find(|(n, _)| *n == name)?.1.to_owned());
        check_size(found, variable).map_err(|e| e.to_string())
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
