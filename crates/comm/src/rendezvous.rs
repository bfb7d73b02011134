//! Where ranks that were started one by one find each other: a TCP connection from each to rank 0.
//!
//! Launchers (`torchrun --no-python`, Slurm, a shell) tell each process where rank 0 is, which rank it is and
//! how many there are, in the variables MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK. That is
//! enough to agree on the few bytes by which NCCL then connects them: so all this can do is gather bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{DisplaySeconds, Error, Result, ranks};

/// The first bytes on every connection, both ways: nobody else begins like this.
const MAGIC: [u8; 8] = *b"espalr\x00\x01";
/// How long to wait before another attempt.
const PAUSE: Duration = Duration::from_millis(20);
/// The most that a peer may announce: what is gathered is small.
const LARGEST: usize = 64 << 20;
/// Ports that are tried where the launcher itself sits on the one it names.
const PORTS_BESIDE: u16 = 8;

/// What a launcher sets for a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousConfig {
    /// Its number in the world.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
    /// Its number among those of its machine: which GPU is its.
    pub local_rank: usize,
    /// Where rank 0 is.
    pub host: String,
    /// The ports on which rank 0 may listen, the first that is free.
    pub ports: Vec<u16>,
}

impl RendezvousConfig {
    /// From the variables of this process.
    pub fn from_environment() -> Result<RendezvousConfig> {
        RendezvousConfig::from_variables(|name| std::env::var(name).ok())
    }

    /// From variables that `variable` looks up.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<RendezvousConfig> {
        // Slurm and MPI have names of their own for what they know; where rank 0 is, they leave to the job script.
        let number = |names: &[&str], example: &str| -> Result<usize> {
            let Some((name, value)) = names.iter().find_map(|name| Some((name, variable(name)?))) else {
                return refuse(format!(
                    "{} is not set: start the ranks with torchrun --no-python or srun, or set it, for example {example}",
                    names[0]
                ));
            };
            let wrong = || Error::Variables { what: format!("{name} must be a whole number, got `{value}`") };
            value.trim().parse().map_err(|_| wrong())
        };
        let rank = number(&["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"], "RANK=0")?;
        let sizes =
            ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];
        let size = number(&sizes, "WORLD_SIZE=2")?;
        let locals = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];
        let local_rank = number(&locals, "LOCAL_RANK=0")?;
        if rank >= size {
            return refuse(format!("RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0"));
        }
        let Some(host) = variable("MASTER_ADDR").filter(|host| !host.trim().is_empty()) else {
            return refuse(
                "MASTER_ADDR is not set: it is the machine of rank 0, for example the first that `scontrol show \
                 hostnames` prints"
                    .to_owned(),
            );
        };
        let port = number(&["MASTER_PORT"], "MASTER_PORT=29500")?;
        let Some(port) = u16::try_from(port).ok().filter(|&port| port > 0) else {
            return refuse(format!("MASTER_PORT must be from 1 to 65535, got {port}"));
        };
        // torchrun keeps a server of its own on that port.
        let agent =
            variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let ports = if agent {
            (1..=PORTS_BESIDE).filter_map(|beside| port.checked_add(beside)).collect()
        } else {
            vec![port]
        };
        Ok(RendezvousConfig { rank, size, local_rank, host: host.trim().to_owned(), ports })
    }
}

/// A rank's connection to the others.
#[derive(Debug)]
pub struct Rendezvous {
    rank: usize,
    size: usize,
    /// Of rank 0, to all others, in the order of ranks; of the others, to rank 0.
    peers: Vec<TcpStream>,
}

impl Rendezvous {
    /// Waits until all ranks have connected, or names those that have not.
    pub fn connect(config: &RendezvousConfig, limit: Duration) -> Result<Rendezvous> {
        let until = Deadline::new(limit);
        let peers = match config {
            RendezvousConfig { size: 1, .. } => Vec::new(),
            RendezvousConfig { rank: 0, .. } => welcome(config, until)?,
            _ => vec![join(config, until)?],
        };
        let mut met = Rendezvous { rank: config.rank, size: config.size, peers };
        // Nobody goes on before all have connected.
        met.gather(&[], until.left().max(PAUSE))?;
        Ok(met)
    }

    /// Its number in the world.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The connections: of rank 0, to all others, in the order of ranks; of the others, to rank 0.
    pub(crate) fn into_streams(self) -> Vec<TcpStream> {
        self.peers
    }

    /// Where each rank listens that opened a port: as rank 0 sees it, and rank 0 as each sees it. All must
    /// call it.
    pub(crate) fn addresses(&mut self, port: u16, limit: Duration) -> Result<Vec<SocketAddr>> {
        let launch = |error: std::io::Error| Error::Launch { what: format!("a rank is gone: {error}") };
        let ports = self.gather(&port.to_le_bytes(), limit)?;
        let seen: Vec<IpAddr> = self
            .peers
            .iter()
            .map(|peer| peer.peer_addr().map(|address| address.ip().to_canonical()))
            .collect::<std::io::Result<_>>()
            .map_err(launch)?;
        let addresses: Vec<String> = seen.iter().map(IpAddr::to_string).collect();
        let table = self.gather(addresses.join(" ").as_bytes(), limit)?.swap_remove(0);
        let local = IpAddr::from([127, 0, 0, 1]);
        let root = if self.rank == 0 { local } else { seen[0] };
        let table = String::from_utf8_lossy(&table).into_owned();
        // Who comes over the loopback is on rank 0's machine: others reach it where they reach rank 0.
        let others = table.split_whitespace().map(|address| match address.parse() {
            Ok(ip) if !IpAddr::is_loopback(&ip) => ip,
            _ => root,
        });
        let port = |bytes: &[u8]| bytes.try_into().map_or(0, u16::from_le_bytes);
        let ports = ports.iter().map(|bytes| port(bytes));
        Ok(std::iter::once(root).chain(others).zip(ports).map(|(ip, port)| (ip, port).into()).collect())
    }

    /// An all-gather of a few bytes, in the order of ranks. All must call it.
    pub fn gather(&mut self, local: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let until = Deadline::new(limit);
        let lost = |rank: usize, peer: usize, error: std::io::Error| -> Error {
            let why = if timed_out(&error) {
                format!("said nothing for {}", DisplaySeconds(limit))
            } else {
                format!("was lost: {error}")
            };
            Error::Launch {
                what: format!("rank {rank} waited for rank {peer} at the rendezvous, which {why}"),
            }
        };
        if self.rank > 0 {
            let rank = self.rank;
            let root = &mut self.peers[0];
            send(root, local, until).map_err(|error| lost(rank, 0, error))?;
            return (0..self.size)
                .map(|_| receive(root, until).map_err(|error| lost(rank, 0, error)))
                .collect();
        }
        let mut all = vec![local.to_vec()];
        for (i, peer) in self.peers.iter_mut().enumerate() {
            all.push(receive(peer, until).map_err(|error| lost(0, i + 1, error))?);
        }
        for (i, peer) in self.peers.iter_mut().enumerate() {
            all.iter()
                .try_for_each(|bytes| send(peer, bytes, until))
                .map_err(|error| lost(0, i + 1, error))?;
        }
        Ok(all)
    }
}

/// Rank 0: listens until all others have connected.
fn welcome(config: &RendezvousConfig, until: Deadline) -> Result<Vec<TcpStream>> {
    let listener = listen(config)?;
    listener.set_nonblocking(true).map_err(|e| Error::Launch { what: format!("cannot listen: {e}") })?;
    let mut peers: Vec<Option<TcpStream>> = (1..config.size).map(|_| None).collect();
    while peers.iter().any(Option::is_none) {
        if until.is_over() {
            let missing: Vec<usize> = (1..config.size).filter(|&rank| peers[rank - 1].is_none()).collect();
            return launch(format!(
                "rank 0 waited {} for {} at the rendezvous on {}:{}; were they started, with this MASTER_ADDR?",
                DisplaySeconds(until.limit),
                ranks(&missing),
                config.host,
                listener.local_addr().map_or(0, |address| address.port())
            ));
        }
        let Ok((mut peer, _)) = listener.accept() else {
            thread::sleep(PAUSE.min(until.left()));
            continue;
        };
        // A stranger, or a rank that went away again: nobody was lost.
        let Ok(Some((rank, size))) = greeted(&mut peer, until) else { continue };
        let problem = if size != config.size {
            Some(format!("rank 0 was started as one of {} ranks, rank {rank} as one of {size}", config.size))
        } else if rank == 0 || rank >= size {
            Some(format!("rank 0 was joined by another rank {rank}"))
        } else if peers[rank - 1].is_some() {
            Some(format!(
                "rank {rank} came twice to the rendezvous: is another job using the same MASTER_PORT?"
            ))
        } else {
            None
        };
        let answer = problem.clone().unwrap_or_default();
        if send(&mut peer, answer.as_bytes(), until).is_err() && problem.is_none() {
            continue;
        }
        match problem {
            Some(what) => return launch(what),
            None => peers[rank - 1] = Some(peer),
        }
    }
    Ok(peers.into_iter().flatten().collect())
}

fn listen(config: &RendezvousConfig) -> Result<TcpListener> {
    let mut refused = String::new();
    for &port in &config.ports {
        match TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))) {
            Ok(listener) => return Ok(listener),
            Err(error) => refused = format!("{port}: {error}"),
        }
    }
    launch(format!("rank 0 cannot listen on MASTER_PORT {refused}; choose another port"))
}

/// All others: connect to rank 0, as soon as it listens.
fn join(config: &RendezvousConfig, until: Deadline) -> Result<TcpStream> {
    let mut last = String::from("nothing answered");
    loop {
        for &port in &config.ports {
            match knock(config, port, until) {
                Ok(Some(mut root)) => match receive(&mut root, until) {
                    Ok(problem) if problem.is_empty() => return Ok(root),
                    Ok(problem) => return launch(String::from_utf8_lossy(&problem).into_owned()),
                    Err(error) => last = error.to_string(),
                },
                Ok(None) => last = "something else listens there".to_owned(),
                Err(error) => last = error.to_string(),
            }
        }
        if until.is_over() {
            return launch(format!(
                "rank {} waited {} for rank 0 at {}:{} ({last}); is it running, and is the port open?",
                config.rank,
                DisplaySeconds(until.limit),
                config.host,
                config.ports[0]
            ));
        }
        thread::sleep(PAUSE.min(until.left()));
    }
}

/// Tries one port of rank 0; `None` where a stranger answers.
fn knock(config: &RendezvousConfig, port: u16, until: Deadline) -> std::io::Result<Option<TcpStream>> {
    let mut connected = Err(ErrorKind::AddrNotAvailable.into());
    for address in (&*config.host, port).to_socket_addrs()? {
        connected = TcpStream::connect_timeout(&address, until.left().max(PAUSE));
        if connected.is_ok() {
            break;
        }
    }
    let mut root = connected?;
    root.set_nodelay(true)?;
    // A stranger may listen there and say nothing; it does not take all the time there is.
    let soon = Deadline::new(until.left().min(Duration::from_secs(1)));
    write(&mut root, &hello(config), soon)?;
    let mut magic = [0; 8];
    read(&mut root, &mut magic, soon)?;
    Ok((magic == MAGIC).then_some(root))
}

/// What a rank sends first: its number, and of how many it is one.
fn hello(config: &RendezvousConfig) -> Vec<u8> {
    [&MAGIC[..], &(config.rank as u64).to_le_bytes(), &(config.size as u64).to_le_bytes()].concat()
}

/// Receives who has connected, and confirms that this is rank 0; `None` for a stranger.
fn greeted(peer: &mut TcpStream, until: Deadline) -> std::io::Result<Option<(usize, usize)>> {
    peer.set_nonblocking(false)?;
    peer.set_nodelay(true)?;
    let soon = Deadline::new(until.left().min(Duration::from_secs(1)));
    let mut hello = [0; 24];
    read(peer, &mut hello, soon)?;
    if hello[..8] != MAGIC {
        return Ok(None);
    }
    write(peer, &MAGIC, soon)?;
    let read_u64 =
        |at: usize| u64::from_le_bytes(hello[at..at + 8].try_into().expect("eight bytes")) as usize;
    Ok(Some((read_u64(8), read_u64(16))))
}

/// A length and as many bytes.
fn send(peer: &mut TcpStream, bytes: &[u8], until: Deadline) -> std::io::Result<()> {
    write(peer, &(bytes.len() as u64).to_le_bytes(), until)?;
    write(peer, bytes, until)
}

fn receive(peer: &mut TcpStream, until: Deadline) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    read(peer, &mut length, until)?;
    let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > LARGEST {
        return Err(std::io::Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut bytes = vec![0; length];
    read(peer, &mut bytes, until)?;
    Ok(bytes)
}

fn write(peer: &mut TcpStream, mut bytes: &[u8], until: Deadline) -> std::io::Result<()> {
    while !bytes.is_empty() {
        peer.set_write_timeout(Some(until.left_or_timed_out()?))?;
        match peer.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read(peer: &mut TcpStream, mut bytes: &mut [u8], until: Deadline) -> std::io::Result<()> {
    while !bytes.is_empty() {
        peer.set_read_timeout(Some(until.left_or_timed_out()?))?;
        match peer.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes = &mut bytes[n..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn timed_out(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn refuse<T>(what: String) -> Result<T> {
    Err(Error::Variables { what })
}

fn launch<T>(what: String) -> Result<T> {
    Err(Error::Launch { what })
}

/// When an operation must be done.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    fn new(limit: Duration) -> Deadline {
        Deadline { start: Instant::now(), limit }
    }

    fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// For sockets, to which no time at all means no limit.
    fn left_or_timed_out(&self) -> std::io::Result<Duration> {
        let left = self.left();
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<RendezvousConfig, String> {
        let variable = |name: &str| Some(variables.iter().find(|(n, _)| *n == name)?.1.to_owned());
        RendezvousConfig::from_variables(variable).map_err(|e| e.to_string())
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29500"),
    ];

    fn torchrun_with(name: &str, value: Option<&str>) -> Result<RendezvousConfig, String> {
        let others = TORCHRUN.into_iter().filter(|(n, _)| *n != name);
        config(&others.chain(value.map(|value| (name, value))).collect::<Vec<_>>())
    }

    #[test]
    fn all_launchers_say_the_same() {
        let expected =
            RendezvousConfig { rank: 3, size: 4, local_rank: 1, host: "node7".into(), ports: vec![29500] };
        assert_eq!(config(&TORCHRUN).unwrap(), expected);
        for of_rank in [
            ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
            ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
        ] {
            let mut variables = TORCHRUN;
            variables.iter_mut().zip(of_rank).for_each(|((name, _), theirs)| *name = theirs);
            assert_eq!(config(&variables).unwrap(), expected);
        }
        let agent = torchrun_with("TORCHELASTIC_USE_AGENT_STORE", Some("True")).unwrap();
        assert_eq!(agent.ports, (29501..29509).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let message_of = |name, value| torchrun_with(name, value).unwrap_err();
        assert_eq!(
            message_of("RANK", None),
            "RANK is not set: start the ranks with torchrun --no-python or srun, or set it, for example RANK=0"
        );
        assert_eq!(message_of("RANK", Some("three")), "RANK must be a whole number, got `three`");
        assert_eq!(
            message_of("RANK", Some("4")),
            "RANK is 4, but WORLD_SIZE is 4: ranks are numbered from 0"
        );
        assert!(
            message_of("MASTER_ADDR", None)
                .starts_with("MASTER_ADDR is not set: it is the machine of rank 0")
        );
        assert_eq!(
            message_of("MASTER_PORT", Some("70000")),
            "MASTER_PORT must be from 1 to 65535, got 70000"
        );
    }
}
