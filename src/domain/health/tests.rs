//! The step, transition by transition, and what holds for every order of reports.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use proptest::prelude::*;

use super::*;

const ECC: u32 = 0x80E0_1801;
const UNLISTED: u32 = 0xDEAD_BEEF;
const QUIET: i64 = 60;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn policy() -> Policy {
    Policy { table: Table::default(), quiet: Duration::from_mins(1), misses: 3 }
}

fn of(overrides: &[(u32, Action)]) -> Policy {
    let overrides = overrides.iter().copied().collect();
    Policy { table: Table { overrides, link_taints: false }, ..policy() }
}

/// A whole answer: this level, these codes and no others.
fn read(level: Level, codes: &[u32]) -> Report {
    Report::Read(HealthReading { level, codes: codes.to_vec(), ..HealthReading::default() })
}

/// An answer whose list of codes may have more.
fn partly(level: Level, codes: &[u32]) -> Report {
    Report::Read(HealthReading { level, codes: codes.to_vec(), partial: true, ..HealthReading::default() })
}

fn well() -> Report {
    read(Level::Ok, &[])
}

fn event(code: u32, level: Level, turn: Turn) -> Report {
    Report::Event(FaultEvent { code, level, turn })
}

fn occurred(code: u32) -> Report {
    event(code, Level::Critical, Turn::Occurred)
}

fn recovered(code: u32) -> Report {
    event(code, Level::Critical, Turn::Recovered)
}

fn link(link: Link) -> Report {
    Report::Read(HealthReading { link: Some(link), ..HealthReading::default() })
}

/// The states after each report, at these seconds.
fn walk(policy: &Policy, reports: &[(i64, Report)]) -> Vec<Health> {
    let mut states: Vec<Health> = Vec::new();
    for (second, report) in reports {
        let next = Health::step(states.last(), report, policy, at(*second));
        states.push(next);
    }
    states
}

fn conditions(policy: &Policy, reports: &[(i64, Report)]) -> Vec<Condition> {
    walk(policy, reports).iter().map(|health| health.condition).collect()
}

/// A name, a policy, and at each second a report and what follows.
type Walk = (&'static str, Policy, Vec<(i64, Report, Condition)>);

#[test]
#[allow(clippy::too_many_lines, reason = "it is one table")]
fn every_transition_is_as_the_table_says() {
    use Condition::{Fatal, Lost, Ok, Tainted, Unknown, Warn};
    let evict = || of(&[(ECC, Action::Evict)]);
    let table: Vec<Walk> = vec![
        ("a first good answer", policy(), vec![(0, well(), Ok)]),
        ("a first bad answer", policy(), vec![(0, read(Level::Critical, &[]), Tainted)]),
        ("an answer that says nothing", policy(), vec![(0, partly(Level::Unknown, &[]), Unknown), (5, well(), Ok)]),
        ("a minor alarm is usable", policy(), vec![(0, well(), Ok), (5, read(Level::Minor, &[]), Warn)]),
        (
            "a warning is damped too",
            policy(),
            vec![(0, read(Level::Minor, &[]), Warn), (5, well(), Warn), (64, well(), Warn), (65, well(), Ok)],
        ),
        ("a listed code taints whatever the level", policy(), vec![(0, read(Level::Minor, &[ECC]), Tainted)]),
        (
            "a major level is explained by codes that are ignored",
            policy(),
            vec![(0, read(Level::Major, &[LINK_DOWN]), Ok), (5, read(Level::Major, &[LINK_DOWN, UNLISTED]), Tainted)],
        ),
        (
            "a list that was not read to its end explains nothing",
            policy(),
            vec![(0, partly(Level::Major, &[LINK_DOWN]), Tainted)],
        ),
        (
            "a critical level is explained by the administrator alone",
            policy(),
            vec![(0, read(Level::Critical, &[LINK_DOWN]), Tainted)],
        ),
        (
            "a critical level is explained by the administrator",
            of(&[(LINK_DOWN, Action::Ignore)]),
            vec![(0, read(Level::Critical, &[LINK_DOWN]), Ok)],
        ),
        (
            "an unlisted code is judged by the level",
            policy(),
            vec![(0, read(Level::Minor, &[UNLISTED]), Warn), (5, read(Level::Unknown, &[UNLISTED]), Tainted)],
        ),
        (
            "an event before the poll that tells it too",
            policy(),
            vec![
                (0, well(), Ok),
                (1, occurred(ECC), Tainted),
                (5, read(Level::Critical, &[ECC]), Tainted),
                (9, recovered(ECC), Tainted),
                (10, well(), Tainted),
                (70, well(), Ok),
            ],
        ),
        (
            "an event whose recovery was lost",
            policy(),
            vec![(0, occurred(ECC), Tainted), (5, well(), Tainted), (65, well(), Ok)],
        ),
        (
            "a mere suggestion is nothing",
            policy(),
            vec![(0, well(), Ok), (1, event(UNLISTED, Level::Ok, Turn::Occurred), Ok)],
        ),
        (
            "a fault that was over at once",
            policy(),
            vec![
                (0, well(), Ok),
                (1, event(ECC, Level::Critical, Turn::Once), Tainted),
                (60, well(), Tainted),
                (61, well(), Ok),
            ],
        ),
        (
            "a card that flaps is tainted until it is quiet",
            policy(),
            vec![
                (0, occurred(ECC), Tainted),
                (1, recovered(ECC), Tainted),
                (50, occurred(ECC), Tainted),
                (51, recovered(ECC), Tainted),
                (62, well(), Tainted),
                (110, well(), Tainted),
                (111, well(), Ok),
            ],
        ),
        (
            "missed answers are unknown, and not bad",
            policy(),
            vec![
                (0, well(), Ok),
                (5, Report::Missed, Ok),
                (10, Report::Missed, Ok),
                (15, Report::Missed, Unknown),
                (20, well(), Ok),
                (25, Report::Missed, Ok),
            ],
        ),
        (
            "missed answers cure nothing",
            policy(),
            vec![
                (0, read(Level::Critical, &[ECC]), Tainted),
                (500, Report::Missed, Tainted),
                (505, Report::Missed, Tainted),
                (510, Report::Missed, Tainted),
                (515, well(), Tainted),
                (575, well(), Ok),
            ],
        ),
        (
            "the quiet time does not pass while nobody answers",
            policy(),
            vec![(0, occurred(ECC), Tainted), (1, well(), Tainted), (500, Report::Missed, Tainted), (505, well(), Ok)],
        ),
        (
            "a list that was not read cures nothing",
            policy(),
            vec![
                (0, read(Level::Critical, &[ECC]), Tainted),
                (5, partly(Level::Minor, &[]), Tainted),
                (500, partly(Level::Unknown, &[]), Tainted),
                (505, partly(Level::Ok, &[]), Tainted),
                (565, partly(Level::Ok, &[]), Ok),
            ],
        ),
        (
            "a lost card, and back",
            policy(),
            vec![(0, well(), Ok), (5, Report::Lost, Lost), (10, well(), Tainted), (70, well(), Ok)],
        ),
        ("a card that says itself that it is gone", policy(), vec![(0, read(Level::Gone, &[]), Lost)]),
        (
            "what the administrator calls fatal",
            evict(),
            vec![(0, well(), Ok), (5, read(Level::Critical, &[ECC]), Fatal), (10, well(), Fatal), (70, well(), Ok)],
        ),
        (
            "an administrator's ignore is at once",
            of(&[(ECC, Action::Ignore)]),
            vec![(0, read(Level::Minor, &[ECC]), Ok)],
        ),
        ("a link that is down is no taint", policy(), vec![(0, link(Link::Down), Ok)]),
        (
            "unless it is told to be",
            Policy { table: Table { link_taints: true, ..Table::default() }, ..policy() },
            vec![(0, link(Link::Down), Tainted), (5, link(Link::Up), Tainted), (65, link(Link::Up), Ok)],
        ),
        (
            "a link that is not told has not recovered",
            Policy { table: Table { link_taints: true, ..Table::default() }, ..policy() },
            vec![
                (0, link(Link::Down), Tainted),
                (5, well(), Tainted),
                (500, well(), Tainted),
                (501, link(Link::Up), Tainted),
            ],
        ),
        (
            "a clock that jumps back makes nothing last longer",
            policy(),
            vec![
                (10_000, occurred(ECC), Tainted),
                (10_001, recovered(ECC), Tainted),
                (100, well(), Tainted),
                (159, well(), Tainted),
                (160, well(), Ok),
            ],
        ),
        (
            "an unknown code that recovers without having occurred",
            policy(),
            vec![(0, well(), Ok), (1, recovered(UNLISTED), Ok)],
        ),
    ];
    for (name, policy, rows) in table {
        let (reports, wanted): (Vec<_>, Vec<_>) =
            rows.into_iter().map(|(second, report, wanted)| ((second, report), wanted)).unzip();
        assert_eq!(conditions(&policy, &reports), wanted, "{name}");
    }
}

#[test]
fn since_moves_only_when_the_condition_changes() {
    let warmer = Report::Read(HealthReading { temperature: Some(50), ..HealthReading::default() });
    let states = walk(
        &policy(),
        &[(1, well()), (2, warmer), (3, occurred(ECC)), (4, occurred(UNLISTED)), (5, well()), (65, well())],
    );
    let since: Vec<_> = states.iter().map(|health| health.since.as_second()).collect();
    assert_eq!(since, [1, 1, 3, 3, 3, 65]);
    assert_eq!(states[1].reading.temperature, Some(50));
}

#[test]
fn what_is_news_is_said_once_however_often_a_card_flaps() {
    let mut reports = vec![(0, well())];
    for second in 0..40 {
        reports.push((second, occurred(ECC)));
        reports.push((second, recovered(ECC)));
    }
    reports.extend([(41, occurred(UNLISTED)), (42, well()), (43, Report::Missed), (200, well())]);
    let states = walk(&policy(), &reports);
    let news = (0..states.len()).filter(|index| states[*index].is_news(index.checked_sub(1).map(|last| &states[last])));
    let times: Vec<_> = news.map(|index| reports[index].0).collect();
    assert_eq!(times, [0, 41, 200], "the fault, another beside it, and that all is well");
}

#[test]
fn a_first_good_or_unknown_answer_is_no_news_and_a_first_bad_one_is() {
    let news = |report| Health::step(None, &report, &policy(), at(1)).is_news(None);
    assert!(!news(well()));
    assert!(!news(partly(Level::Unknown, &[])));
    assert!(news(read(Level::Minor, &[])));
    assert!(news(read(Level::Major, &[])));
}

#[test]
fn sixty_four_faults_at_once_are_one_state_and_a_short_text() {
    let codes: Vec<u32> = (0..64).map(|n| 0xA000_0000 + n).collect();
    let health = Health::step(None, &read(Level::Critical, &codes), &policy(), at(1));
    assert_eq!((health.condition, health.codes().len(), health.memory().len()), (Condition::Tainted, 64, 65));
    assert!(health.text().ends_with("and 59 more"), "{}", health.text());
    assert!(health.text().len() < 200 && health.text().is_ascii());
}

#[test]
fn however_many_codes_come_the_state_stays_small_and_keeps_the_worst() {
    let mut health = Health::step(None, &well(), &of(&[(ECC, Action::Evict)]), at(0));
    for code in 0..10_000 {
        health = Health::step(Some(&health), &event(code, Level::Minor, Turn::Occurred), &policy(), at(1));
    }
    health = Health::step(Some(&health), &occurred(ECC), &of(&[(ECC, Action::Evict)]), at(1));
    assert!(health.reading.codes.len() <= CODES_MAX && health.faults.len() <= 2 * CODES_MAX + 1);
    assert_eq!(health.condition, Condition::Fatal);
}

#[test]
fn a_restart_is_no_recovery() {
    let policy = of(&[(ECC, Action::Evict)]);
    let states = walk(&policy, &[(0, read(Level::Critical, &[ECC])), (10, well())]);
    assert_eq!(states[0].memory(), states[1].memory(), "a card that flaps writes nothing");
    let mut health = Health::remembered(&states[1].memory(), None, at(20));
    assert_eq!((health.condition, health.since), (Condition::Fatal, at(0)));
    for (second, wanted) in [(21, Condition::Fatal), (80, Condition::Fatal), (81, Condition::Ok)] {
        health = Health::step(Some(&health), &well(), &policy, at(second));
        assert_eq!(health.condition, wanted, "{second}");
    }
    assert!(health.memory().is_empty());
}

#[test]
fn a_remembered_card_that_is_well_is_no_news() {
    let remembered = Health::remembered(&[], Some(Link::Up), at(0));
    assert_eq!((remembered.condition, remembered.link), (Condition::Unknown, Some(Link::Up)));
    let missed = Health::step(Some(&remembered), &Report::Missed, &policy(), at(1));
    let good = Health::step(Some(&missed), &well(), &policy(), at(2));
    assert!(!missed.is_news(Some(&remembered)) && !good.is_news(Some(&missed)));
    let bad = Health::step(Some(&remembered), &read(Level::Minor, &[]), &policy(), at(2));
    assert!(bad.is_news(Some(&remembered)));
    let gone = Health::step(Some(&good), &Report::Lost, &policy(), at(3));
    assert!(gone.is_news(Some(&good)));
}

#[test]
fn a_lesser_event_at_the_end_of_the_quiet_time_is_held_in_its_turn() {
    let unknown = read(Level::Unknown, &[7]);
    let event = Report::Event(FaultEvent { code: 7, level: Level::Minor, turn: Turn::Once });
    let states = walk(&policy(), &[(0, unknown), (1, well()), (61, event), (62, well()), (121, well()), (122, well())]);
    let actions: Vec<_> = states.iter().map(Health::action).collect();
    let (taint, warn) = (Action::Taint, Action::Warn);
    assert_eq!(actions, [taint, taint, warn, warn, warn, Action::Ignore]);
}

#[test]
fn what_the_administrator_now_ignores_is_over_at_once() {
    let before = Health::step(None, &read(Level::Minor, &[ECC]), &policy(), at(0));
    let after = Health::step(Some(&before), &read(Level::Minor, &[ECC]), &of(&[(ECC, Action::Ignore)]), at(5));
    assert_eq!((before.condition, after.condition), (Condition::Tainted, Condition::Ok));
    let worse = Health::step(Some(&after), &read(Level::Minor, &[ECC]), &of(&[(ECC, Action::Evict)]), at(10));
    assert_eq!(worse.condition, Condition::Fatal);
}

#[test]
fn the_link_is_down_at_once_and_up_when_it_stays_up() {
    let reports =
        [(0, link(Link::Up)), (1, link(Link::Down)), (2, link(Link::Up)), (61, link(Link::Down)), (62, link(Link::Up))];
    let mut states = walk(&policy(), &reports);
    for second in [121, 122] {
        states.push(Health::step(states.last(), &link(Link::Up), &policy(), at(second)));
    }
    let links: Vec<_> = states.iter().map(|health| health.link.unwrap().as_str()).collect();
    assert_eq!(links, ["up", "down", "down", "down", "down", "down", "up"]);
    assert!(states.windows(2).all(|pair| !pair[1].is_news(Some(&pair[0]))), "it is no fault");
}

#[test]
fn the_quiet_time_is_that_of_the_fault_which_ended_last() {
    let states = walk(
        &policy(),
        &[(0, read(Level::Critical, &[ECC, UNLISTED])), (10, read(Level::Critical, &[UNLISTED])), (20, well())],
    );
    let quiet: Vec<_> = states.iter().map(|health| health.quiet_since().map(Timestamp::as_second)).collect();
    assert_eq!(quiet, [None, None, Some(20)]);
    assert_eq!(states[2].bad_since(), at(0));
}

/// Codes of every kind: listed to taint, listed to ignore, unlisted, to be evicted for.
const CODES: [u32; 4] = [ECC, LINK_DOWN, UNLISTED, 7];

fn any_level() -> impl Strategy<Value = Level> {
    prop::sample::select(vec![Level::Ok, Level::Unknown, Level::Minor, Level::Major, Level::Critical, Level::Gone])
}

fn any_report() -> impl Strategy<Value = Report> {
    let codes = prop::sample::subsequence(CODES.to_vec(), 0..=CODES.len());
    let turn = prop::sample::select(vec![Turn::Occurred, Turn::Recovered, Turn::Once]);
    let link = prop::sample::select(vec![None, Some(Link::Up), Some(Link::Down)]);
    prop_oneof![
        4 => (any_level(), codes, any::<bool>(), link).prop_map(|(level, codes, partial, link)| {
            Report::Read(HealthReading { level, codes, partial, link, ..HealthReading::default() })
        }),
        4 => (prop::sample::select(CODES.to_vec()), any_level(), turn)
            .prop_map(|(code, level, turn)| event(code, level, turn)),
        1 => Just(Report::Missed),
        1 => Just(Report::Lost),
    ]
}

/// Reports at times that mostly go on, and sometimes jump back.
fn any_walk() -> impl Strategy<Value = Vec<(i64, Report)>> {
    prop::collection::vec((-100..90_i64, any_report()), 1..40).prop_map(|steps| {
        let mut second = 1_000;
        let mut next = |step: i64| {
            second = (second + if step < -90 { step * 5 } else { step.max(0) }).max(0);
            second
        };
        steps.into_iter().map(|(step, report)| (next(step), report)).collect()
    })
}

fn any_policy() -> impl Strategy<Value = Policy> {
    (any::<bool>(), any::<bool>()).prop_map(|(link_taints, evict)| Policy {
        table: Table { overrides: evict.then_some((7, Action::Evict)).into_iter().collect(), link_taints },
        ..policy()
    })
}

/// What a report by itself says must be done about the card.
fn demanded(report: &Report, table: &Table) -> Action {
    match report {
        Report::Read(reading) => {
            let codes = reading.codes.iter().map(|code| table.fixed(*code).unwrap_or(Action::Ignore));
            let own = if matches!(reading.level, Level::Gone) { Action::Taint } else { Action::Ignore };
            codes.max().unwrap_or(Action::Ignore).max(own)
        }
        Report::Event(FaultEvent { turn: Turn::Recovered, .. }) | Report::Missed => Action::Ignore,
        Report::Event(event) => table.action(event.code, event.level),
        Report::Lost => Action::Taint,
    }
}

proptest! {
    /// Whatever came before: what a report says is bad is bad after it, and stays so for the quiet time.
    #[test]
    fn no_order_of_reports_loses_a_fault(policy in any_policy(), walk_of in any_walk(), tail in any_walk()) {
        let states = walk(&policy, &walk_of);
        for (state, (_, report)) in states.iter().zip(&walk_of) {
            prop_assert!(state.action() >= demanded(report, &policy.table), "{report:?} {state:?}");
        }
        // Nothing ends a fault in less than the quiet time.
        let (last, (second, report)) = (states.last().unwrap(), walk_of.last().unwrap());
        let wanted = demanded(report, &policy.table);
        let mut state = last.clone();
        for (index, (_, report)) in tail.iter().enumerate() {
            let soon = second + i64::try_from(index).unwrap() % QUIET;
            state = Health::step(Some(&state), report, &policy, at(soon));
            prop_assert!(state.action() >= wanted.min(last.action()), "{report:?} {state:?}");
        }
    }

    /// Whatever came before: after good answers for the quiet time the card is well.
    #[test]
    fn a_recovered_card_is_usable_after_the_quiet_time(policy in any_policy(), walk_of in any_walk(), back in 0..2_000_i64) {
        let mut state = walk(&policy, &walk_of).pop().unwrap();
        let start = (walk_of.last().unwrap().0 - back).max(0);
        // A link that was down is not up for not being told of.
        let is_down = state.reading.link == Some(Link::Down);
        let good = HealthReading { link: is_down.then_some(Link::Up), ..HealthReading::default() };
        for second in (0..=QUIET).step_by(5) {
            state = Health::step(Some(&state), &Report::Read(good.clone()), &policy, at(start + second));
        }
        prop_assert_eq!(state.condition, Condition::Ok);
        prop_assert!(state.faults.is_empty() && state.memory().is_empty());
    }

    /// Only a list that was read to its end, a level without any alarm, or its own recovery takes a code away.
    #[test]
    fn what_is_not_known_is_not_recovered(policy in any_policy(), walk_of in any_walk()) {
        let mut state = Health::step(None, &read(Level::Critical, &[ECC]), &policy, at(0));
        for (second, report) in walk_of {
            let ends = match &report {
                Report::Read(reading) => !reading.partial || reading.level == Level::Ok,
                Report::Event(event) => event.code == ECC && event.turn == Turn::Recovered,
                Report::Missed | Report::Lost => false,
            };
            if !ends {
                state = Health::step(Some(&state), &report, &policy, at(second));
                prop_assert!(state.reading.codes.contains(&ECC));
                prop_assert!(!state.condition.is_usable());
            }
        }
    }

    /// A step is a function of its arguments, a condition follows from the faults, and a memory gives back what it was made of.
    #[test]
    fn a_state_and_its_memory_agree(policy in any_policy(), walk_of in any_walk()) {
        let states = walk(&policy, &walk_of);
        prop_assert_eq!(&states, &walk(&policy, &walk_of));
        for (state, (second, _)) in states.iter().zip(&walk_of) {
            prop_assert!(state.since <= at(*second));
            let bad = state.action() >= Action::Taint;
            prop_assert_eq!(bad || state.condition == Condition::Lost, !state.condition.is_usable());
            prop_assert_eq!(state.condition == Condition::Fatal, state.action() == Action::Evict
                && state.condition != Condition::Lost);
            let again = Health::remembered(&state.memory(), state.link, at(*second));
            prop_assert_eq!(again.memory(), state.memory());
            prop_assert_eq!(again.action() >= Action::Taint, bad);
        }
    }
}

#[test]
fn the_table_of_codes_is_in_order_and_names_are_short() {
    let all = BTreeMap::from([(CARD_LOST, "card dropped"), (LINK_DOWN, "network link down")]);
    for (code, wanted) in all {
        assert_eq!(meaning(code), Some(wanted));
    }
    assert_eq!(named(ECC), "80E01801 HBM multi-bit ECC");
    assert_eq!(named(0xF), "0000000F");
}

#[test]
fn the_worst_of_two_dies_counts_for_the_card() {
    let ecc = |corrected| Some(EccCounts { corrected, uncorrected: 1, isolated_pages: 0 });
    let a = HealthReading {
        level: Level::Minor,
        codes: vec![2],
        partial: true,
        temperature: Some(40),
        power: Some(900),
        ecc: ecc(1),
        link: Some(Link::Down),
    };
    let b = HealthReading {
        level: Level::Critical,
        codes: vec![1, 2],
        partial: false,
        temperature: Some(60),
        power: Some(100),
        ecc: ecc(2),
        link: Some(Link::Up),
    };
    let both = HealthReading {
        level: Level::Critical,
        codes: vec![1, 2],
        partial: true,
        temperature: Some(60),
        power: Some(1000),
        ecc: Some(EccCounts { corrected: 3, uncorrected: 2, isolated_pages: 0 }),
        link: Some(Link::Down),
    };
    assert_eq!(HealthReading::worst([&a, &b]), both);
    assert_eq!(HealthReading::worst([&b, &a]), both);
    assert_eq!(HealthReading::worst([]).level, Level::Unknown);
}
