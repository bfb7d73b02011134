//! What a person sees on a terminal while a run goes on: a bar of one line, and nothing of it when it is over.

use std::fs::File;
use std::io::Read;
use std::process::Stdio;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::{TestDir, command};

/// A screen that understands what a bar writes: returns, ends of lines, a line up, a line cleared.
#[derive(Default)]
struct Screen {
    lines: Vec<Vec<char>>,
    row: usize,
    column: usize,
    widest: usize,
}

impl Screen {
    fn of(text: &str) -> Screen {
        let mut screen = Screen::default();
        let mut letters = text.chars();
        while let Some(letter) = letters.next() {
            match letter {
                '\r' => screen.column = 0,
                '\n' => screen.row += 1,
                '\x1b' => {
                    let mut code = String::new();
                    for letter in letters.by_ref() {
                        code.push(letter);
                        if letter.is_ascii_alphabetic() {
                            break;
                        }
                    }
                    screen.control(code.trim_start_matches('['));
                }
                letter => screen.put(letter),
            }
        }
        screen
    }

    fn line(&mut self) -> &mut Vec<char> {
        let row = self.row;
        self.lines.resize_with(self.lines.len().max(row + 1), Vec::new);
        &mut self.lines[row]
    }

    fn put(&mut self, letter: char) {
        let column = self.column;
        let line = self.line();
        line.resize(line.len().max(column + 1), ' ');
        line[column] = letter;
        self.column += 1;
        self.widest = self.widest.max(self.column);
    }

    fn control(&mut self, code: &str) {
        let count = || code[..code.len() - 1].parse::<usize>().unwrap_or(1);
        match code.chars().last() {
            Some('A') => self.row = self.row.saturating_sub(count()),
            Some('B') => self.row += count(),
            Some('K') => self.line().clear(),
            Some('J') => {
                self.line().clear();
                let row = self.row;
                self.lines.truncate(row + 1);
            }
            _ => {}
        }
    }

    fn text(&self) -> String {
        self.lines.iter().map(|line| line.iter().collect::<String>() + "\n").collect()
    }
}

#[test]
fn a_bar_takes_one_line_and_leaves_none() {
    let folder = TestDir::with_run_file();
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    tcsetwinsize(&master, Winsize { ws_row: 24, ws_col: 72, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal =
        || -> Stdio { File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap().into() };
    let mut run = command(&folder, "--set train.steps=300 --set train.eval_every=100");
    let mut child = run
        .env_remove("NO_COLOR")
        .env("TERM", "xterm")
        .stdout(terminal())
        .stderr(terminal())
        .spawn()
        .unwrap();
    drop(run);
    let mut bytes = Vec::new();
    // The end of what is said on a terminal is an error.
    let _ = File::from(master).read_to_end(&mut bytes);
    assert!(child.wait().unwrap().success());
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains('█'), "there was a bar: {text}");
    let drawn: Vec<&str> = text.split(['\r', '\n']).filter(|line| line.contains("tokens/s  ")).collect();
    assert!(drawn.iter().any(|line| line.contains("/300 ")), "{text}");
    let screen = Screen::of(&text);
    let left = screen.text();
    assert!(!left.contains('█') && !left.contains('░'), "nothing of the bar is left:\n{left}");
    assert!(left.contains("step    300/300  loss "), "what it said last is:\n{left}");
    let of_bar = text.split(['\r', '\n']).filter(|line| line.contains('█'));
    for line in of_bar {
        let plain = Screen::of(line).widest;
        assert!(plain <= 72, "{plain}: {line:?}");
    }
}
