//! How many pictures of a folder become training crops of 224 x 224 in a second: decoded each time, and read from
//! the cache; on one thread and on all.
//!
//!     cargo bench -p espalier-data --bench pictures -- FOLDER
//!
//! `benches/pictures.py decode` makes such a folder, and says what Pillow does.

use espalier_data::{DataSplit, Dataset};
use espalier_plan::RunFile;
use std::time::Instant;

fn main() {
    let Some(folder) = std::env::args().skip(1).find(|argument| !argument.starts_with('-')) else {
        return println!("no folder of pictures is given");
    };
    let folder = std::fs::canonicalize(folder).expect("a folder");
    let cache = std::env::temp_dir().join(format!("espalier-pictures-{}", std::process::id()));
    for (name, cached) in
        [("decoded each time", "cache = \"none\"".into()), ("cached", format!("cache_path = {cache:?}"))]
    {
        let text = format!(
            "[model]\nname = \"resnet-18\"\n[data]\nkind = \"images\"\npath = {folder:?}\n{cached}\n[train]\nsteps = 1"
        );
        let run = RunFile::parse(&text, &[]).expect("a run file");
        let start = Instant::now();
        let data = Dataset::open(&run).expect("pictures");
        let count = data.len(DataSplit::Train).min(2000);
        println!("{name}: opened in {:.2} s", start.elapsed().as_secs_f64());
        let picks: Vec<(u64, usize)> = (0..count).map(|i| (0, i)).collect();
        for threads in [1, std::thread::available_parallelism().map_or(1, usize::from)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            let rates = (0..3).map(|_| {
                let start = Instant::now();
                let batches = picks.chunks(128).map(|picks| data.batch(DataSplit::Train, picks));
                pool.install(|| batches.for_each(|batch| drop(batch.expect("a batch"))));
                count as f64 / start.elapsed().as_secs_f64()
            });
            println!("  {threads} threads: {:.0} pictures/s", rates.fold(0.0, f64::max));
        }
    }
    let _ = std::fs::remove_dir_all(cache);
}
