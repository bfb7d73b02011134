//! `espalier completions`: scripts that shells complete by.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::{TestDir, espalier, refused, stderr, stdout};

fn completions(shell: &str) -> Output {
    espalier(Path::new("."), &format!("completions {shell}"))
}

/// The commands that `espalier --help` lists.
fn commands() -> Vec<String> {
    let help = stdout(&espalier(Path::new("."), "--help"));
    let listed = help.lines().take_while(|line| *line != "Options:").filter(|line| line.starts_with("  "));
    let listed = listed.filter_map(|line| line.split_whitespace().next());
    listed.map(str::to_owned).collect()
}

#[test]
fn every_shell_gets_every_command() {
    let commands = commands();
    assert!(commands.len() > 10 && commands.contains(&"train".into()), "{commands:?}");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = completions(shell);
        assert!(output.status.success(), "{shell}: {}", stderr(&output));
        let script = String::from_utf8(output.stdout).unwrap();
        for command in &commands {
            assert!(script.contains(command.as_str()), "{shell} knows nothing of {command}");
        }
    }
    let text = refused(completions("dos"), &[]);
    assert!(text.starts_with("error: invalid value 'dos' for '<SHELL>'"), "{text}");
    assert_eq!(text.lines().count(), 1);
}

/// What bash makes of it, as if the tabulator had been pressed behind these words.
#[test]
fn bash_completes_by_it() {
    let folder = TestDir::new();
    let script = folder.join("espalier.bash");
    fs::write(&script, completions("bash").stdout).unwrap();
    let complete = |words: &[&str]| {
        let [.., before, last] = words else { panic!("the program and a word") };
        let line = format!(
            "source '{}'; COMP_WORDS=({}); COMP_CWORD={}; _espalier espalier '{last}' '{before}'; echo \"${{COMPREPLY[@]}}\"",
            script.display(),
            words.join(" "),
            words.len() - 1
        );
        let output = Command::new("bash").args(["--norc", "-c", &line]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(complete(&["espalier", "tra"]), "train");
    assert_eq!(complete(&["espalier", "train", "--res"]), "--resume");
    assert_eq!(complete(&["espalier", "export", "--dtype", "b"]), "bf16");
}
