//! The pictures that people know from the papers.

use super::*;

fn picture(name: ScheduleName, options: ScheduleOptions) -> String {
    let (schedule, timeline, _) = ScheduleReport::of(name, &options).unwrap();
    timeline.picture(&schedule, Ink::Plain)
}

fn equal(options: ScheduleOptions) -> ScheduleOptions {
    ScheduleOptions { units: PassUnits { forward: 1.0, backward: 1.0 }, ..options }
}

#[test]
fn schedules_look_as_in_their_papers() {
    insta::assert_snapshot!(picture(ScheduleName::Axonn, ScheduleOptions::new(3, 5)), @"
    rank 0 |0>1>2>........0<<<3>1<<<4>2<<<..3<<<..4<<<|
    rank 1 |..0>1>2>..0<<<..1<<<3>2<<<4>3<<<..4<<<....|
    rank 2 |....0>0<<<1>1<<<2>2<<<3>3<<<4>4<<<........|
    0> forward of micro-batch 0, 0< its backward, . idle
    ");
    insta::assert_snapshot!(picture(ScheduleName::Gpipe, ScheduleOptions::new(4, 4)), @"
    rank 0 |0>1>2>3>..................0<<<1<<<2<<<3<<<|
    rank 1 |..0>1>2>3>............0<<<1<<<2<<<3<<<....|
    rank 2 |....0>1>2>3>......0<<<1<<<2<<<3<<<........|
    rank 3 |......0>1>2>3>0<<<1<<<2<<<3<<<............|
    0> forward of micro-batch 0, 0< its backward, . idle
    ");
    let flushed = picture(ScheduleName::OneFOneB, ScheduleOptions::new(4, 8));
    insta::assert_snapshot!(flushed, @"
    rank 0 |0>1>2>3>............0<<<4>1<<<5>2<<<6>3<<<7>4<<<..5<<<..6<<<..7<<<|
    rank 1 |..0>1>2>........0<<<3>1<<<4>2<<<5>3<<<6>4<<<7>5<<<..6<<<..7<<<....|
    rank 2 |....0>1>....0<<<2>1<<<3>2<<<4>3<<<5>4<<<6>5<<<7>6<<<..7<<<........|
    rank 3 |......0>0<<<1>1<<<2>2<<<3>3<<<4>4<<<5>5<<<6>6<<<7>7<<<............|
    0> forward of micro-batch 0, 0< its backward, . idle
    ");
    let batches = ScheduleOptions { batches: 2, ..ScheduleOptions::new(4, 4) };
    for (name, options) in
        [(ScheduleName::PipeDream, ScheduleOptions::new(4, 8)), (ScheduleName::TwoBw, batches)]
    {
        assert_eq!(picture(name, options), flushed, "{name}: only the weights differ");
    }
    insta::assert_snapshot!(picture(ScheduleName::Interleaved, ScheduleOptions::new(4, 8)), @"
    rank 0 |0a>1a>2a>3a>0b>1b>2b>3b>4a>5a>6a>.........0b<<<<7a>1b<<<<...4b>2b<<<<5b>3b<<<<6b>0a<<<<7b>1a<<<<2a<<<<...3a<<<<...4b<<<<...5b<<<<...6b<<<<...7b<<<<4a<<<<5a<<<<6a<<<<7a<<<<|
    rank 1 |...0a>1a>2a>3a>0b>1b>2b>3b>4a>......0b<<<<5a>1b<<<<6a>2b<<<<7a>3b<<<<4b>0a<<<<5b>1a<<<<6b>2a<<<<7b>3a<<<<...4b<<<<...5b<<<<...6b<<<<...7b<<<<4a<<<<5a<<<<6a<<<<7a<<<<......|
    rank 2 |......0a>1a>2a>3a>0b>1b>2b>...0b<<<<3b>1b<<<<4a>2b<<<<5a>3b<<<<6a>0a<<<<7a>1a<<<<4b>2a<<<<5b>3a<<<<6b>4b<<<<7b>5b<<<<...6b<<<<...7b<<<<4a<<<<5a<<<<6a<<<<7a<<<<............|
    rank 3 |.........0a>1a>2a>3a>0b>0b<<<<1b>1b<<<<2b>2b<<<<3b>3b<<<<4a>0a<<<<5a>1a<<<<6a>2a<<<<7a>3a<<<<4b>4b<<<<5b>5b<<<<6b>6b<<<<7b>7b<<<<4a<<<<5a<<<<6a<<<<7a<<<<..................|
    0a> forward of micro-batch 0, 0a< its backward, a and b the rank's chunks, . idle
    ");
    insta::assert_snapshot!(picture(ScheduleName::ZbH1, ScheduleOptions::new(4, 8)), @"
    rank 0 |0>1>2>3>......0<0=4>1<1=5>2<2=6>3<3=7>4<4=5<5=6<6=7<7=|
    rank 1 |..0>1>2>....0<3>1<0=4>2<1=5>3<2=6>4<3=7>5<4=6<5=7<6=7=|
    rank 2 |....0>1>..0<2>1<3>2<0=4>3<1=5>4<2=6>5<3=7>6<4=7<5=6=7=|
    rank 3 |......0>0<1>1<2>2<3>3<0=4>4<1=5>5<2=6>6<3=7>7<4=5=6=7=|
    0> forward of micro-batch 0, 0< its input gradients, 0= its weight gradients, . idle
    ");
    insta::assert_snapshot!(picture(ScheduleName::Chimera, equal(ScheduleOptions::new(4, 4))), @"
    rank 0 |0>1>..2>2<3>3<0<..1<|
    rank 1 |..0>2>1>3>2<0<3<1<..|
    rank 2 |..2>0>3>1>0<2<1<3<..|
    rank 3 |2>3>..0>0<1>1<2<..3<|
    0> forward of micro-batch 0, 0< its backward, . idle
    ");
    insta::assert_snapshot!(picture(ScheduleName::ChimeraDoubling, ScheduleOptions::new(4, 8)), @"
    rank 0 |0>1>2>3>4>5>4<<<6>7>5<<<..0<<<6<<<1<<<7<<<2<<<....3<<<|
    rank 1 |..0>1>4>5>2>3>6>7>4<<<0<<<5<<<1<<<6<<<2<<<7<<<3<<<....|
    rank 2 |..4>5>0>1>6>7>2>3>0<<<4<<<1<<<5<<<2<<<6<<<3<<<7<<<....|
    rank 3 |4>5>6>7>0>1>0<<<2>3>1<<<..4<<<2<<<5<<<3<<<6<<<....7<<<|
    0> forward of micro-batch 0, 0< its backward, . idle
    ");
    let options = ScheduleOptions { pipelines: Some(4), ..ScheduleOptions::new(8, 8) };
    insta::assert_snapshot!(picture(ScheduleName::Chimera, equal(options)), @"
    rank 0 |0>1>..6>4>7>5>2>2<3>3<4<6<5<7<0<..1<|
    rank 1 |..0>6>1>7>4>2>5>3>2<4<3<5<6<0<7<1<..|
    rank 2 |..6>0>7>1>2>4>3>5>4<2<5<3<0<6<1<7<..|
    rank 3 |6>7>..0>2>1>3>4>4<5>5<2<0<3<1<6<..7<|
    rank 4 |4>5>..2>0>3>1>6>6<7>7<0<2<1<3<4<..5<|
    rank 5 |..4>2>5>3>0>6>1>7>6<0<7<1<2<4<3<5<..|
    rank 6 |..2>4>3>5>6>0>7>1>0<6<1<7<4<2<5<3<..|
    rank 7 |2>3>..4>6>5>7>0>0<1>1<6<4<7<5<2<..3<|
    0> forward of micro-batch 0, 0< its backward, . idle
    ");
}

#[test]
fn times_that_do_not_divide_each_other() {
    let units = PassUnits { forward: 1.0, backward: 1.7 };
    insta::assert_snapshot!(picture(ScheduleName::OneFOneB, ScheduleOptions { units, ..ScheduleOptions::new(3, 4) }), @"
    rank 0 |0>1>2>......0<<<3>1<<..2<<<..3<<|
    rank 1 |..0>1>...0<<2>1<<<3>2<<..3<<<...|
    rank 2 |....0>0<<1>1<<2>2<<<3>3<<.......|
    0> forward of micro-batch 0, 0< its backward, . idle
    ");
}

#[test]
fn a_long_row_is_cut() {
    let picture = picture(ScheduleName::OneFOneB, ScheduleOptions::new(2, 500));
    let rows: Vec<&str> = picture.lines().collect();
    assert!(rows[0].ends_with('~') && rows[0].len() == rows[1].len() && rows[0].len() < 1020);
    assert!(rows[2].ends_with("~ cut here"), "{}", rows[2]);
}

#[test]
fn colours_change_no_character() {
    let (schedule, timeline, _) =
        ScheduleReport::of(ScheduleName::ZbH1, &ScheduleOptions::new(3, 4)).unwrap();
    let painted = timeline.picture(&schedule, Ink::Colour);
    assert!(painted.contains("\x1b[30;44m0>\x1b[0m"), "{painted}");
    let codes = ["\x1b[30;44m", "\x1b[30;42m", "\x1b[30;43m", "\x1b[0m"];
    let bare = codes.iter().fold(painted, |text, code| text.replace(code, ""));
    assert_eq!(bare, timeline.picture(&schedule, Ink::Plain));
}
