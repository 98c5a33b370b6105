// Live plots of the samples, with uPlot.
/* global uPlot */
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SERIES = ["--accent", "--warn", "--good"];

export class Plot {
  // series: [{label, of(sample)}]; show(value): text of a value; top: the largest value, if it is fixed.
  constructor(element, series, show, top) {
    this.series = series;
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "10px system-ui" };
    this.chart = new uPlot({
      width: Math.max(200, element.clientWidth || 280), height: 92, legend: { show: false },
      cursor: { points: { size: 5 }, drag: { setScale: false } }, padding: [6, 4, 0, 0],
      scales: { y: { range: (_, low, high) => [0, top || Math.max(high, 1e-9) * 1.1] } },
      axes: [{ ...axis, size: 18, space: 70 }, { ...axis, size: 48, values: (_, values) => values.map(show) }],
      series: [{}, ...series.map(({ label }, place) => ({
        label, stroke: style(SERIES[place]), width: 1.5, fill: place ? undefined : `${style(SERIES[0])}22`, points: { show: false },
      }))],
    }, [[], ...series.map(() => [])], element);
    this.resize = new ResizeObserver(() => this.chart.setSize({ width: Math.max(200, element.clientWidth), height: 92 }));
    this.resize.observe(element);
  }

  draw(samples) {
    this.chart.setData([samples.map((one) => one.time), ...this.series.map(({ of }) => samples.map(of))]);
  }

  close() {
    this.resize.disconnect();
    this.chart.destroy();
  }
}
