//! Boots a machine and runs a script in it: `cargo run -p lab --example machine -- trixie 'ps -ef'`.

#[allow(clippy::print_stdout, reason = "it is what the example is for")]
fn main() -> anyhow::Result<()> {
    let mut words = std::env::args().skip(1);
    let suite = words.next().unwrap_or_else(|| "trixie".to_owned());
    let script = words.next().unwrap_or_else(|| "systemctl status --no-pager".to_owned());
    lab::require(&[])?;
    let tar = lab::Root::debian(&suite, &[]).ready()?;
    let started = std::time::Instant::now();
    let machine = lab::Machine::boot(&lab::Options::new("example", &tar), |_| Ok(()))?;
    eprintln!("up in {:.1?}", started.elapsed());
    println!("{}", machine.sh(&script)?);
    Ok(())
}
