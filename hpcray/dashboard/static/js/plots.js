// Live plots of the samples, with uPlot.
/* global uPlot */
import { bytes } from "./dom.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SERIES = ["--accent", "--warn", "--good"];

const LEAST_BYTES = 1024; // of an axis: no labels that are all 0 B
const GAP = 3; // times the usual distance of two samples
const LEAST_GAP = 6; // seconds

// The samples, with a hole where nobody has looked or the job did not answer: no line is drawn over it.
export function withGaps(samples) {
  const apart = samples.slice(1).map((one, place) => one.time - samples[place].time).sort((a, b) => a - b);
  const usual = apart[apart.length >> 1] || 0;
  return samples.flatMap((one, place) => {
    const last = samples[place - 1]?.time;
    return last !== undefined && one.time - last > Math.max(GAP * usual, LEAST_GAP) ? [{ time: (last + one.time) / 2, gap: true }, one] : [one];
  });
}

export class Plot {
  // series: [{label, of(sample)}]; show(value): text of a value; top: the largest value, if it is fixed.
  constructor(element, series, show, top) {
    this.series = series;
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "10px system-ui" };
    this.chart = new uPlot({
      width: Math.max(200, element.clientWidth || 280), height: 92, legend: { show: false },
      cursor: { points: { size: 5 }, drag: { setScale: false } }, padding: [6, 4, 0, 0],
      scales: { y: { range: (_, low, high) => [0, top || Math.max(high, show === bytes ? LEAST_BYTES : 1e-9) * 1.1] } },
      axes: [{ ...axis, size: 18, space: 70 }, { ...axis, size: 48, values: (_, values) => values.map(show) }],
      series: [{}, ...series.map(({ label }, place) => ({
        label, stroke: style(SERIES[place]), width: 1.5, fill: place ? undefined : `${style(SERIES[0])}22`, points: { show: false },
      }))],
    }, [[], ...series.map(() => [])], element);
    this.resize = new ResizeObserver(() => this.chart.setSize({ width: Math.max(200, element.clientWidth), height: 92 }));
    this.resize.observe(element);
  }

  draw(samples) {
    const rows = withGaps(samples);
    this.chart.setData([rows.map((one) => one.time), ...this.series.map(({ of }) => rows.map((one) => (one.gap ? null : of(one))))]);
  }

  close() {
    this.resize.disconnect();
    this.chart.destroy();
  }
}
